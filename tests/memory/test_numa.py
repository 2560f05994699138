"""Placement of a slab at the NUMA node of the rank's GPU, if that node is known."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flashckpt.config import Config
from megatron_flashckpt.memory import mapping
from megatron_flashckpt.memory import slab as slab_module
from megatron_flashckpt.memory.mapping import address_of
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import PAGE
from megatron_flashckpt.save.new_slab import node_of_gpu
from megatron_flashckpt.save.node_link import NodeLink
from tests.simulated_gpu import Node, simulated_gpus

MPOL_PREFERRED = 1


class Kernel:
    """A stand-in for the kernel that records each `mbind` and refuses it if `refuses` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.refuses = False

    def syscall(self, number: Any, *arguments: Any) -> int:
        address, nbytes, mode, mask, bits, flags = arguments
        assert bits.value == 64 * len(mask) + 1
        call = (number.value, address.value, nbytes.value, mode.value, *mask, flags.value)
        self.calls.append(call)
        if self.refuses:
            ctypes.set_errno(errno.EPERM)
            return -1
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(mapping, "_syscall", made.syscall)
    return made


@pytest.mark.parametrize(("node", "mask"), [(0, (1,)), (5, (1 << 5,)), (64, (0, 1))])
@pytest.mark.parametrize(("machine", "number"), [("x86_64", 237), ("aarch64", 235)])
def test_the_node_is_requested_before_a_page_is_allocated(
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
    node: int,
    mask: tuple[int, ...],
    machine: str,
    number: int,
) -> None:
    Slab.create(1, 0, PAGE, "0").close()
    assert kernel.calls == [], "without a node no placement is requested"
    monkeypatch.setattr(mapping, "_MACHINE", machine)
    asked_before: list[int] = []
    monkeypatch.setattr(
        slab_module, "allocate", lambda *_, **__: asked_before.append(len(kernel.calls))
    )
    slab = Slab.create(1, 0, PAGE, "0", numa_node=node)
    nbytes = slab.geometry.nbytes
    assert kernel.calls == [(number, address_of(slab.memory), nbytes, MPOL_PREFERRED, *mask, 0)]
    assert asked_before == [1]
    slab.close()


@pytest.mark.parametrize("why", ["refused", "another machine"])
def test_a_slab_is_made_even_if_the_kernel_refuses_the_node(
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    kernel.refuses = True
    if why == "another machine":
        monkeypatch.setattr(mapping, "_MACHINE", "riscv64")
    with caplog.at_level(logging.DEBUG):
        Slab.create(1, 0, PAGE, "0", numa_node=3).close()
    reason = os.strerror(errno.EPERM) if why == "refused" else "unknown on riscv64"
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot place memory at NUMA node 3: mbind: {reason}"
    ]
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


def test_the_real_kernel_places_a_slab_at_node_0() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no NUMA nodes")
    slab = Slab.create(1, 0, PAGE, "numa", numa_node=0)
    (line,) = [
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if "memfd:flashckpt-numa" in line
    ]
    assert line.split()[:2] == [f"{address_of(slab.memory):x}", "prefer:0"]
    slab.close()


@pytest.fixture
def gpus() -> Iterator[Node]:
    with simulated_gpus(8) as node:
        yield node


@pytest.mark.usefixtures("gpus")
def test_a_gpu_has_the_node_of_its_pci_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:03:00.0").mkdir()
    file = tmp_path / "0000:03:00.0/numa_node"
    file.write_text("1\n")
    assert node_of_gpu(3, tmp_path) == 1
    assert node_of_gpu(4, tmp_path) is None
    file.write_text("-1\n")
    assert node_of_gpu(3, tmp_path) is None
    file.write_text("1\n")
    older = types.SimpleNamespace(major=9)  # releases of torch without PCI numbers
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: older)
    assert node_of_gpu(3, tmp_path) is None


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_slab_lies_at_the_training_thread_s_gpu(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    """Another thread's current device, in which a slab is made, is 0 until the thread sets one."""
    if has_gpu:
        request.getfixturevalue("gpus")
        torch.cuda.set_device(5)
    link = NodeLink(str(tmp_path), 0, Config(runtime_dir=str(tmp_path / "run")))
    monkeypatch.setattr(link._connection, "client", lambda: None)
    monkeypatch.setattr(link, "_attach", lambda slab: None)
    monkeypatch.setattr("megatron_flashckpt.save.new_slab.node_of_gpu", lambda device: device + 10)
    nodes: list[int | None] = []
    create = Slab.create

    def noted(*sizes: Any, numa_node: int | None, **more: Any) -> Slab:
        nodes.append(numa_node)
        return create(*sizes, **more)

    monkeypatch.setattr(Slab, "create", noted)
    link.prepare(PAGE)
    link.ensure_slab(10 * PAGE, 0)  # larger, for a save
    assert nodes == [15 if has_gpu else None] * 2
    link.close(leave=False)
