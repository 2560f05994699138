"""`flashckpt prune`: the rules, what is removed, and the bytes that this frees."""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path

import pytest

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.test_fence import OLD, claim_of
from tests.cli.conftest import Run, only_line
from tests.support.checkpoints import make, snapshot


def test_prune_removes_checkpoints_that_no_rule_keeps_unless_dry_run(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 15, 20):
        make(save, iteration)
    monkeypatch.setenv("FLASHCKPT_RETENTION__EVERY", "10")
    before = snapshot(save)
    dry = run("prune", save, "--dry-run")
    assert (dry.status, dry.out) == (0, "iter_0000015: would be removed\n")
    assert snapshot(save) == before
    ran = run("prune", save)
    assert (ran.status, ran.out) == (0, "iter_0000015: removed\n")
    assert sorted(path.name for path in save.iterdir()) == ["iter_0000010", "iter_0000020", TRACKER]
    assert run("prune", save).out == f"{save}: no checkpoint to remove\n"


def test_prune_refuses_a_directory_with_a_renewed_claim(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20):
        make(save, iteration)
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "1")
    storage, done = PosixStorage(save), threading.Event()
    claims.put(storage, claim_of(OLD))
    assert run("ls", save).lines[-1].startswith("claimed by run aaaaaaaa (agent ")

    def renew() -> None:
        former = claim_of(OLD, renewed_at=0.0)
        claims.put(storage, former)
        for number in itertools.count(1):
            renewed = claim_of(OLD, renewed_at=float(number))
            assert claims.renew(storage, former, renewed)
            former = renewed
            if done.wait(0.02):
                return

    writer = threading.Thread(target=renew)
    writer.start()
    try:
        ran = run("prune", save)
        assert "iter_0000010: would be removed" in run("prune", save, "--dry-run").out
    finally:
        done.set()
        writer.join()
    only_line(
        ran, r".*nothing was removed, .*run aaaaaaaa \(agent \d+ on elsewhere, .*\) saves there .*"
    )
    assert run("prune", save).out == "iter_0000010: removed\n", "the claim is no longer renewed"


def test_prune_without_a_rule_is_refused(run: Run, save: Path) -> None:
    make(save, 10)
    only_line(run("prune", save), r"'retention' has no rule, .*FLASHCKPT_RETENTION__LATEST=3", 2)


def test_prune_without_a_tracker_removes_nothing(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20):
        make(save, iteration)
    (save / TRACKER).unlink()
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "1")
    assert run("prune", save).status == 0
    assert (save / "iter_0000010/manifest.json").exists()


def test_prune_names_a_skipped_checkpoint_once(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20, 30):
        make(save, iteration)
    (save / "iter_0000010/manifest.json").write_text("{")
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "1")
    ran = run("prune", save)
    assert (ran.status, ran.out) == (0, "iter_0000020: removed\n")
    assert re.fullmatch(
        r"flashckpt: retention keeps iteration 10, because .* is not a manifest \(.*\)\n", ran.err
    )
