"""An agent whose run was overtaken: it changes no file that others see."""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent.claim import ENDED, IDLE, TRAINING, Claim, RunKey
from megatron_flashckpt.agent.fence import Fence, FencedStorage
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import CorruptCheckpointError, OvertakenError, StorageError
from megatron_flashckpt.failpoints import VARIABLE
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_commit import iterations_in
from tests.agent.test_failures import assert_intact
from tests.support.trainer import eventually, is_alive, new_save_id, remove_tree

OLD, NEW = RunKey(1, "aaaaaaaa"), RunKey(2, "bbbbbbbb")


def claim_of(key: RunKey, **more: object) -> Claim:
    made = Claim(
        state=TRAINING,
        renewed_at=time.time(),
        claimed_at=time.time(),
        interval_s=0.1,
        pid=os.getpid(),
        started=0,
        machine="another machine",
        epoch=key.epoch,
        host="elsewhere",
        run_id=key.run_id,
    )
    return msgspec.structs.replace(made, **more)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path / "save")


# ---------------------------------------------------------------------- the claim


def test_a_claim_is_read_back_as_it_was_put(storage: PosixStorage) -> None:
    claim = claim_of(OLD)
    assert claims.read(storage) is None
    claims.put(storage, claim)
    assert claims.read(storage) == claim


def test_a_renewal_never_restores_a_replaced_claim(storage: PosixStorage) -> None:
    older, newer = claim_of(OLD), claim_of(NEW)
    claims.put(storage, older)
    assert claims.renew(storage, older, claim_of(OLD, state=IDLE, pid=2**22, host="a" * 64))
    claims.put(storage, newer)
    assert not claims.renew(storage, older, older)
    assert claims.read(storage) == newer
    (Path(storage.place) / file_names.CLAIM).unlink()
    assert not claims.renew(storage, older, older)
    assert claims.read(storage) is None


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1 not msgpack",
        b"\x91" * 100_000,
        claims.encode(claim_of(OLD))[:50],
        claims.encode(claim_of(OLD, host="\x1b[2J")),
        claims.encode(claim_of(OLD, renewed_at=1e300)),
        claims.encode(claim_of(OLD, renewed_at=float("nan"))),
        claims.encode(claim_of(OLD, interval_s=1e9)),
    ],
    ids="empty garbage nested cut escapes far-off no-time rare".split(),
)
def test_invalid_bytes_are_not_read_as_a_claim(storage: PosixStorage, encoded: bytes) -> None:
    storage.put(file_names.CLAIM, encoded)
    with pytest.raises(CorruptCheckpointError):
        claims.read(storage)


# ---------------------------------------------------------------------- the fence


def is_refused(fence: Fence, storage: PosixStorage) -> bool:
    try:
        fence.check(storage)
    except StorageError:
        return True
    return False


def test_an_agent_accepts_the_claim_of_its_run_and_no_other(storage: PosixStorage) -> None:
    fence = Fence()
    fence.hold(OLD, has_rank_0=True)
    assert not is_refused(fence, storage), "rank 0 reports to its agent before it puts the claim"
    claims.put(storage, claim_of(OLD))
    assert not is_refused(fence, storage)
    claims.put(storage, claim_of(NEW))
    with pytest.raises(OvertakenError, match=r"run bbbbbbbb \(agent .* on elsewhere"):
        fence.check(storage)
    claims.put(storage, claim_of(RunKey(1, "cccccccc")))
    assert is_refused(fence, storage), "the epoch is not higher, but the run is another one"
    fence.hold(RunKey(1, "cccccccc"), has_rank_0=True)
    assert not is_refused(fence, storage)


def test_an_agent_commits_the_staged_saves_of_its_former_run(storage: PosixStorage) -> None:
    fence = Fence()
    fence.hold(OLD, has_rank_0=True)
    claims.put(storage, claim_of(OLD))
    fence.check_commits(storage)
    fence.hold(NEW, has_rank_0=True)
    fence.check_commits(storage)
    claims.put(storage, claim_of(NEW))
    fence.check_commits(storage)


def test_an_agent_without_a_run_accepts_only_the_first_claim_that_it_reads(
    storage: PosixStorage,
) -> None:
    fence = Fence()
    claims.put(storage, claim_of(OLD))
    assert not is_refused(fence, storage)
    claims.put(storage, claim_of(NEW))
    assert is_refused(fence, storage)


def test_an_agent_that_has_lost_rank_0_commits_no_save(storage: PosixStorage) -> None:
    fence = Fence()
    fence.hold(OLD, has_rank_0=True)
    claims.put(storage, claim_of(NEW))
    fence.hold(NEW, has_rank_0=False)
    fence.check(storage)
    with pytest.raises(OvertakenError, match="rank 0 has moved to another node"):
        fence.check_commits(storage)


def test_an_agent_without_rank_0_waits_for_its_ranks_to_name_the_run(storage: PosixStorage) -> None:
    """Rank 0 of its own job put the claim; the other ranks report the run a moment later."""
    fence = Fence(report_s=60.0)
    fence.hold(OLD, has_rank_0=False)
    claims.put(storage, claim_of(NEW))
    telling = threading.Timer(0.1, lambda: fence.hold(NEW, has_rank_0=False))
    telling.start()
    assert not is_refused(fence, storage)
    telling.join()


def test_an_agent_without_rank_0_is_overtaken_if_no_rank_names_the_run(
    storage: PosixStorage,
) -> None:
    fence = Fence(report_s=0.1)
    fence.hold(OLD, has_rank_0=False)
    claims.put(storage, claim_of(NEW))
    assert is_refused(fence, storage)


def test_an_agent_does_not_write_to_a_replaced_directory(storage: PosixStorage) -> None:
    root = Path(storage.place)
    fence = Fence()
    fenced = FencedStorage(storage, fence)
    fence.hold(OLD, has_rank_0=True)
    claims.put(storage, claim_of(OLD))
    fenced.put("a", b"")
    (root / file_names.CLAIM).unlink()
    assert not is_refused(fence, storage), "the directory at this path is still the same"
    root.rename(root.with_name("moved"))
    eventually("a check that reads the claim", lambda: is_refused(fence, storage))
    with pytest.raises(StorageError, match="removed or replaced") as away:
        fenced.put("a", b"")
    assert not isinstance(away.value, OvertakenError), "no other run has it"
    assert not root.exists(), "the agent does not make the directory again"
    root.mkdir()
    assert is_refused(fence, storage)
    remove_tree(root)
    root.with_name("moved").rename(root)
    assert not is_refused(fence, storage)


def test_an_overtaken_agent_changes_no_file_in_storage(storage: PosixStorage) -> None:
    fence = Fence()
    fenced = FencedStorage(storage, fence)
    fence.hold(OLD, has_rank_0=True)
    claims.put(storage, claim_of(OLD))
    fenced.put("directory/file", b"1")
    fenced.put("empty/file", b"1")
    fenced.delete("empty/file")
    claims.put(storage, claim_of(NEW))
    eventually("a check that reads the claim", lambda: is_refused(fence, storage))
    before = sorted(Path(storage.place).rglob("*"))
    for change in (
        lambda: fenced.put("directory/file", b"2"),
        lambda: fenced.put("new/file", b"2"),
        lambda: fenced.rewrite("directory/file", b"1", b"2"),
        lambda: fenced.create("directory/file", 1),
        lambda: fenced.move("directory/file", "other"),
        lambda: fenced.delete("directory/file"),
        lambda: fenced.delete_directory("empty"),
    ):
        with pytest.raises(OvertakenError):
            change()
    assert sorted(Path(storage.place).rglob("*")) == before
    assert storage.read("directory/file") == b"1"


# ---------------------------------------------------------------------- agents


def test_the_agent_of_rank_0_renews_the_claim_with_the_run_state(node: Node, root: Path) -> None:
    storage = PosixStorage(root)
    trainer = node.trainer(root)
    key = trainer.claim()

    def stored_claim() -> Claim:
        claim = claims.read(storage)
        assert claim is not None
        assert (claim.key, claim.pid, claim.host) == (key, *node.agents(), platform.node())
        return claim

    first = stored_claim()
    eventually("a renewal", lambda: stored_claim() != first)
    assert stored_claim().state == TRAINING
    trainer.hang_up()
    eventually("the run is over", lambda: stored_claim().state == IDLE)
    (agent,) = node.agents()
    os.kill(agent, signal.SIGTERM)
    eventually("the end of the agent", lambda: not is_alive(agent))
    claim = claims.read(storage)
    assert claim is not None
    assert claim.state == ENDED


def test_an_agent_puts_a_removed_claim_again(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    key = trainer.claim()
    claim = claims.read(PosixStorage(root))
    eventually("a renewal", lambda: claims.read(PosixStorage(root)) != claim)
    (root / file_names.CLAIM).unlink()
    put = eventually("another claim", lambda: claims.read(PosixStorage(root)))
    assert put.key == key


def test_the_retention_of_an_overtaken_run_removes_no_checkpoint(
    node: Node, other_node: Node, root: Path
) -> None:
    first = node.trainer(root, retention=Retention(latest=1))
    first.claim()
    assert first.save(1).error is None
    later = other_node.trainer(root)
    run = later.claim("take_over").run_id
    assert later.save(2).error is None
    error = first.save(3).error
    assert error is not None
    assert run in error
    assert iterations_in(root) == [1, 2]
    assert later.save(4).error is None
    assert iterations_in(root) == [1, 2, 4]
    log = node.log(root).read_text()
    assert log.count("ERROR megatron_flashckpt.agent.fence") == 1


def test_a_shard_that_was_removed_while_it_was_written_is_not_committed(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"agent:persist.chunks:1:STOP:{tmp_path / 'reached'}")
    trainer, save_id = node.trainer(root, config=node.config(answer_timeout_s=600.0)), new_save_id()
    trainer.claim()
    asking = threading.Thread(target=trainer.stage, args=(1, save_id))
    asking.start()
    eventually("the agent is stopped", (tmp_path / "reached").exists)
    (root / file_names.iteration_dir(1) / file_names.shard_name(0, save_id)).unlink()
    agent = trainer.client.agent_pid
    eventually("the agent is stopped", lambda: wake(agent))
    asking.join()
    assert f"{file_names.shard_name(0, save_id)} is missing" in str(trainer.outcome().error)
    assert not (root / file_names.iteration_dir(1) / file_names.MANIFEST).exists()
    assert trainer.save(2).error is None
    assert_intact(root, 2, [trainer])


def wake(pid: int) -> bool:
    """Continue a process once it is stopped; return whether it was stopped."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    if state == "T":
        os.kill(pid, signal.SIGCONT)
    return state == "T"


@pytest.mark.parametrize("ended", [True, False])
def test_the_error_of_an_overtaken_run_says_whether_the_later_run_has_ended(
    storage: PosixStorage, ended: bool
) -> None:
    fence = Fence()
    fence.hold(OLD, has_rank_0=True)
    claims.put(storage, claim_of(OLD))
    fence.check(storage)
    state = claims.ENDED if ended else claims.TRAINING
    claims.put(storage, msgspec.structs.replace(claim_of(NEW), state=state))
    with pytest.raises(OvertakenError) as caught:
        fence.check(storage)
    assert ("and has ended" in str(caught.value)) == ended
    assert ("end one of the two jobs" in str(caught.value)) != ended
