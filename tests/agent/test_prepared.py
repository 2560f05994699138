"""Preparation before the first save, so that this save need not wait for memory."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatron_flashckpt.megatron_lm import side_state, side_state_codec
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.size_estimate import SIDE_NBYTES, expect
from megatron_flashckpt.memory import slab as slab_module
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.node_link import NodeLink
from tests.agent.conftest import Node
from tests.megatron_lm.test_side_state import QuantizedLinear
from tests.memory.test_mapping import kernel_collapses
from tests.support.rank_job import JOB, Job
from tests.support.trainer import eventually


def slab_of(checkpointer: Checkpointer) -> Slab:
    """Return the slab after all background work has ended."""
    link: NodeLink = checkpointer.link
    eventually("all prepared", lambda: not link.is_preparing)
    return link._slab


def dry_run(job: Job) -> None:
    job.checkpointer.dry_run(JOB)


def test_the_log_says_what_a_new_slab_got(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    job.checkpointer.link.prepare(25_000_000)
    slab = slab_of(job.checkpointer)
    (line,) = [text for text in caplog.messages if "checkpoint slots" in text]
    nbytes, huge = f"{slab.geometry.nbytes / 2**30:.2f}", f"{slab.huge_nbytes / 2**30:.2f}"
    assert line.startswith(
        f"rank 0: {nbytes} GiB of checkpoint slots, of which {huge} GiB are in pages of 2 MiB, "
        "were made ready in "
    )
    assert bool(slab.huge_nbytes) == kernel_collapses(), "`huge_pages` reaches the kernel"


def test_a_slab_that_is_too_small_is_kept_while_it_holds_a_checkpoint(job: Job) -> None:
    job.checkpointer.link.prepare(1_000_000)
    small = slab_of(job.checkpointer)
    small.slots[0].set_header(SlotHeader(SlotState.KEPT, 1, "000001-aaaa.00001.1", 0, 100))
    dry_run(job)
    assert slab_of(job.checkpointer) is small
    assert job.save(2) is None
    assert slab_of(job.checkpointer) is not small


def test_a_slab_made_by_a_save_is_large_enough_for_the_next(job: Job) -> None:
    """A slab that fits is kept, even if it has less room for metadata than a prepared one."""
    assert job.save(1) is None
    made = slab_of(job.checkpointer)
    dry_run(job)
    assert slab_of(job.checkpointer) is made


def test_a_job_whose_modules_have_extra_states_makes_one_slab(
    job: Job, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 modules have such states: 60 of 2 KiB, all empty before the first step."""
    modules = [QuantizedLinear(history=16) for _ in range(60)]
    chunks: list[Any] = [torch.nn.ModuleDict({"layers": torch.nn.ModuleList(modules)})]
    objects = [(0, f"layers.{n}._extra_state", f"layers._extra_state/{n}") for n in range(60)]
    state = job.checkpointer.model_state
    monkeypatch.setattr(state, "geometry", lambda chunks: ModelGeometry((), [], [], objects))
    made: list[Slab] = []
    create = Slab.create

    def counted(*sizes: Any, **more: Any) -> Slab:
        made.append(create(*sizes, **more))
        return made[-1]

    job.side_state = lambda: {"objects": side_state.extra_states(chunks, state.geometry(chunks))}
    monkeypatch.setattr(Slab, "create", counted)
    expected = expect(state, chunks, None)
    job.checkpointer.link.prepare(expected.nbytes, expected.plan_nbytes)
    assert slab_of(job.checkpointer) is made[0]
    for module in modules:
        module.has_stepped = True
    assert len(side_state_codec.encode(job.side_state())) > SIDE_NBYTES
    job.checkpointer.dry_run(dataclasses.replace(JOB, chunks=chunks))
    assert slab_of(job.checkpointer) is made[0]
    assert job.save(1) is None
    assert made == [slab_of(job.checkpointer)]
    job.assert_stored(root, 1)


class SmallNode:
    """A node whose memory has room for `nbytes` of slabs, including slabs of the agent."""

    def __init__(self, checkpointer: Checkpointer, nbytes: int) -> None:
        self.memory_nbytes = nbytes
        self._link = checkpointer.link
        self._others: set[int] = set()
        self._others.update(self.slabs())  # slabs of tests whose threads still run

    def available_nbytes(self) -> int:
        return self.memory_nbytes - sum(self.slabs().values())

    def slabs(self) -> dict[int, int]:
        """Return the bytes of each slab that a process of this node has mapped, by inode."""
        client, by_inode = self._link.current, dict[int, int]()
        for pid in (os.getpid(), *([client.agent_pid] if client is not None else [])):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "memfd:flashckpt-" in line:
                    bounds, _, _, _, inode, *_ = line.split()
                    begin, end = (int(bound, 16) for bound in bounds.split("-"))
                    by_inode[int(inode)] = end - begin
        return {inode: nbytes for inode, nbytes in by_inode.items() if inode not in self._others}


@pytest.fixture
def small_node(job: Job, monkeypatch: pytest.MonkeyPatch) -> SmallNode:
    """A node with room for one slab of this job, but not for two."""
    made = SmallNode(job.checkpointer, 60_000_000)
    monkeypatch.setattr(slab_module, "available_nbytes", made.available_nbytes)
    monkeypatch.setattr(slab_module, "announced", lambda fd: {})  # slabs of other tests
    return made


def test_an_empty_slab_is_freed_before_a_larger_one_is_made(
    job: Job, root: Path, small_node: SmallNode
) -> None:
    job.checkpointer.link.prepare(20_000_000)
    small = slab_of(job.checkpointer)
    dry_run(job)
    enough = slab_of(job.checkpointer)
    assert enough is not small
    assert job.save(1) is None
    assert slab_of(job.checkpointer) is enough
    assert list(small_node.slabs().values()) == [enough.geometry.nbytes]
    job.assert_stored(root, 1)


def test_a_slab_with_a_checkpoint_is_kept_if_no_larger_one_fits(
    job: Job, small_node: SmallNode
) -> None:
    job.checkpointer.link.prepare(20_000_000)
    small = slab_of(job.checkpointer)
    small.slots[0].set_header(SlotHeader(SlotState.KEPT, 1, job.save_id(1), 0, 100))
    error = job.save(2)
    assert error is not None
    size = r"\d+\.\d MiB"
    assert re.search(
        f"cannot reserve {size} of host memory for 2 checkpoint slots of rank 0", error
    )
    assert re.search(rf"; agent \d+ holds {size}: {size} of rank 0 \(iteration 1, ", error)
    assert slab_of(job.checkpointer) is small
    again, offers = job.checkpointer.link.client().take()
    again.close()
    assert [offer.iteration for offer in offers] == [1]


def test_the_only_slot_is_freed_for_a_larger_one_once_it_is_committed(
    node: Node, make_job: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(msgspec.structs.replace(node.config(), slots=1))
    assert job.save(1) is None
    first = slab_of(job.checkpointer)
    small_node = SmallNode(job.checkpointer, 2 * first.geometry.nbytes)
    small_node._others.discard(os.fstat(first.fd).st_ino)
    monkeypatch.setattr(slab_module, "available_nbytes", small_node.available_nbytes)
    monkeypatch.setattr(slab_module, "announced", lambda fd: {})
    job.tensors += [torch.rand_like(job.tensors[0])]
    job.checkpointer.hook.steps += 1
    assert job.save(2) is None
    (nbytes,) = small_node.slabs().values()
    assert first.geometry.nbytes < nbytes == slab_of(job.checkpointer).geometry.nbytes
    job.assert_stored(root, 2)


@pytest.mark.parametrize(("redundancy", "share"), [("none", 0.0), ("copy", 1.0), ("xor", 0.25)])
def test_a_new_slab_must_leave_memory_for_copies_of_other_nodes(
    node: Node, make_job: Any, monkeypatch: pytest.MonkeyPatch, redundancy: Any, share: float
) -> None:
    config = msgspec.structs.replace(node.config(), redundancy=redundancy, redundancy_group=5)
    monkeypatch.setattr(slab_module, "announced", lambda fd: {})  # slabs of other tests
    job = make_job(config)
    assert job.save(1) is None
    nbytes = slab_of(job.checkpointer).geometry.nbytes
    job.tensors += job.tensors
    for enough in (False, True):
        left = 2.2 * (1 + share) if enough else (2.2 if share else 1.5)
        monkeypatch.setattr(slab_module, "available_nbytes", lambda left=left: int(left * nbytes))
        job.checkpointer.hook.steps += 1
        error = job.save(2 + enough)
        assert (error is None) is enough
        if share and error is not None:
            assert re.search("; in addition, the node is to hold .* MiB for other nodes", error)


def test_the_next_save_retries_a_slab_that_could_not_be_made(
    job: Job, root: Path, small_node: SmallNode
) -> None:
    job.checkpointer.link.prepare(20_000_000)
    slab_of(job.checkpointer)
    small_node.memory_nbytes = 10_000_000
    error = job.save(1)
    assert error is not None
    assert "cannot reserve" in error
    small_node.memory_nbytes = 60_000_000
    assert job.save(2) is None
    job.assert_stored(root, 2)
