"""Transient errors and names that become visible late: one answer of storage is not trusted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from megatron_flashckpt.agent.claim import ENDED, TRAINING
from megatron_flashckpt.agent.commit import outcome_of

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent import commit as commit_module
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import stored
from tests.support.agents import agent_here
from tests.support.persisting import persisted
from tests.support.trainer import eventually

SAVE = "a" * 12
DIRECTORY = file_names.iteration_dir(5)
OPEN = (False, None)


class LateShardsStorage(PosixStorage):
    """Real storage that hides the shards of other nodes until `has_come` is set."""

    has_come = False

    def _is_hidden(self, name: str) -> bool:
        return not self.has_come and file_names.shard_name(1, SAVE) in name

    def size(self, name: str) -> int:
        if self._is_hidden(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return super().size(name)

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        return {name for name in super().present(directory, names) if not self._is_hidden(name)}


def test_a_shard_that_becomes_visible_late_fails_no_save(root: Path) -> None:
    storage = LateShardsStorage(root)
    committing, other = (persisted(storage, SAVE, rank, 2) for rank in range(2))
    for _ in range(2):
        assert outcome_of(committing, 60.0) == OPEN
    assert not (root / DIRECTORY / file_names.MANIFEST).exists()
    assert outcome_of(other, 60.0) == OPEN, "no node has cancelled the save"
    storage.has_come = True
    assert outcome_of(committing, 60.0) == (True, None)
    assert [shard.rank for shard in stored(root, 5).manifest.shards] == [0, 1]


def test_a_shard_that_stays_invisible_fails_the_save(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LateShardsStorage(root)
    committing, _ = (persisted(storage, SAVE, rank, 2) for rank in range(2))
    assert outcome_of(committing, 60.0) == OPEN
    monkeypatch.setattr(commit_module, "_TROUBLE_S", 0.0)
    finished, error = outcome_of(committing, 60.0)
    assert finished
    assert f"{file_names.shard_name(1, SAVE)} is missing" in (error or "")
    assert not (root / DIRECTORY / file_names.MANIFEST).exists()


def test_a_missing_shard_of_the_committing_node_fails_the_save_at_once(root: Path) -> None:
    save = persisted(PosixStorage(root), SAVE)
    (root / DIRECTORY / file_names.shard_name(0, SAVE)).unlink()
    finished, error = outcome_of(save, 60.0)
    assert finished
    assert "is missing" in (error or "")


def test_an_agent_retries_the_last_renewal_of_its_claim(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next start waits until the claim has been silent for long enough."""
    refused = []
    renew = claims.renew

    def refuse_once(storage: object, former: claims.Claim, claim: claims.Claim) -> bool:
        if claim.state == ENDED and not refused:
            refused.append(claim)
            raise StorageError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return renew(storage, former, claim)  # type: ignore[arg-type]

    def state() -> int:
        claim = claims.read(PosixStorage(root))
        assert claim is not None
        return claim.state

    monkeypatch.setattr(claims, "renew", refuse_once)
    with agent_here(node, root):
        trainer = node.trainer(root)
        trainer.claim()
        assert trainer.save(1).error is None
        assert state() == TRAINING
        trainer.hang_up()
    eventually("the last renewal", lambda: state() == ENDED)
    assert refused
