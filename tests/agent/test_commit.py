"""The commit: the moment from which a checkpoint exists, and the order of the steps around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash

from megatron_flashckpt.agent.commit import commit, outcome_of
from megatron_flashckpt.agent.tidying import CommittedSave, tidy
from megatron_flashckpt.errors import CorruptCheckpointError, StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import (
    CommitRecord,
    Coordinates,
    decode_records,
    encode_items,
    encode_records,
)
from megatron_flashckpt.file_format.manifest import merge
from megatron_flashckpt.storage.base import Durable
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, files_of_ours
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.persisting import persisted
from tests.support.trainer import (
    FakeTrainer,
    blocked_open,
    content,
    eventually,
    is_alive,
    new_save_id,
)


def iterations_in(root: Path) -> list[int]:
    iterations = [file_names.parse_iteration_dir(path.name) for path in root.iterdir()]
    return sorted(iteration for iteration in iterations if iteration is not None)


# ---------------------------------------------------------------------- all ranks, this attempt


def test_a_save_is_not_committed_before_the_record_of_the_last_rank(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 3) for rank in range(3)]
    save_id = new_save_id()
    directory = root / file_names.iteration_dir(1)
    for trainer in trainers[:2]:
        trainer.stage(1, save_id)
        record = directory / file_names.record_name(trainer.rank, save_id)
        eventually("the commit record", record.exists)
    for trainer in trainers[:2]:
        results = trainer.client.poll(0.2)
        assert (results.finished, results.pending) == ((), 1)
    assert not (directory / file_names.MANIFEST).exists()
    assert not (root / file_names.TRACKER).exists()
    trainers[2].stage(1, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None] * 3
    assert_intact(root, 1, trainers)


def test_a_record_of_an_earlier_attempt_does_not_count(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    earlier, this = new_save_id(), new_save_id()
    directory = root / file_names.iteration_dir(1)
    trainers[1].stage(1, earlier)
    eventually("a stale record", (directory / file_names.record_name(1, earlier)).exists)
    trainers[0].stage(1, this)
    eventually("a record of this attempt", (directory / file_names.record_name(0, this)).exists)
    assert trainers[0].client.poll(0.3).finished == ()
    assert not (directory / file_names.MANIFEST).exists()
    trainers[1].stage(1, this)
    assert trainers[0].outcome().save_id == this
    assert_intact(root, 1, trainers)
    assert [shard.file for shard in stored(root, 1).manifest.shards] == [
        file_names.shard_name(rank, this) for rank in range(2)
    ]
    eventually(
        "the removal of the earlier attempt",
        lambda: not [name for name in files_of_ours(root) if earlier in name],
    )


def _tampered(record: CommitRecord) -> dict[str, tuple[bytes, str]]:
    def changed(**fields: object) -> bytes:
        return encode_records([msgspec.structs.replace(record, **fields)])

    def nested(body: bytes) -> bytes:
        return xxhash.xxh3_64_digest(body) + body

    me = record.save_id

    return {
        "garbage": (b"\xc1 not msgpack", "is not a commit record"),
        "empty": (b"", "is not a commit record"),
        "deeply nested": (nested(b"\x91" * 100_000), "is not a commit record"),
        "flipped": (changed()[:-1] + b"\0", "its digest does not match"),
        "doubled": (
            changed(rank=0),
            f"is the record of (iteration, save, rank, file) (1, '{me}', 0",
        ),
        "of another save": (changed(save_id="0" * 12), "(1, '000000000000', 1"),
        "of another iteration": (changed(iteration=99), f"(99, '{me}', 1"),
        "of a file elsewhere": (changed(file="../../elsewhere"), "'../../elsewhere'), expected (1"),
        "of an impossible piece": (
            changed(placement=(1,), file=file_names.shard_name(1, me)),
            "a placement of 1 numbers",
        ),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "garbage",
        "empty",
        "deeply nested",
        "flipped",
        "doubled",
        "of another save",
        "of another iteration",
        "of a file elsewhere",
        "of an impossible piece",
    ],
)
def test_a_record_with_wrong_contents_fails_the_save(node: Node, root: Path, kind: str) -> None:
    trainer = node.trainer(root, 0, 2)
    save_id = new_save_id()
    directory = root / file_names.iteration_dir(1)
    trainer.stage(1, save_id)
    own = directory / file_names.record_name(0, save_id)
    eventually("the record of rank 0", own.exists)
    (genuine,) = decode_records(own.read_bytes(), str(own))
    planted, message = _tampered(msgspec.structs.replace(genuine, rank=1))[kind]
    path = directory / file_names.record_name(1, save_id)
    (directory / "planted").write_bytes(planted)
    (directory / "planted").rename(path)
    error = trainer.outcome().error
    assert error is not None
    assert message in error
    assert not (directory / file_names.MANIFEST).exists()
    assert not (root / file_names.TRACKER).exists()


def _record(rank: int, **fields: object) -> CommitRecord:
    record = CommitRecord(
        iteration=1,
        save_id="a" * 12,
        rank=rank,
        coordinates=Coordinates(),
        file=file_names.shard_name(rank, "a" * 12),
        nbytes=1,
        header_digest="",
        template_fingerprint="t",
        template=encode_items(()),
        template_nbytes=0,
        placement=(),
    )
    return msgspec.structs.replace(record, **fields)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([_record(0), _record(2)], r"missing: \[1\]"),
        ([_record(0), _record(1), _record(1), _record(2)], r"ranks \[0, 1, 1, 2\]"),
        ([_record(0), _record(1), _record(2), _record(3)], "for a world of 3"),
        ([_record(0), _record(1), _record(2, save_id="b" * 12)], "different saves"),
        ([_record(0), _record(1), _record(2, iteration=2)], "different saves"),
        ([], r"missing: \[0, 1, 2\]"),
    ],
)
def test_merge_refuses_missing_duplicate_and_mixed_records(
    records: list[CommitRecord], message: str
) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        merge(records, world_size=3, description={}, common_digest="")


def test_merge_lists_shards_in_rank_order() -> None:
    records = [_record(2), _record(0), _record(1)]
    merged = merge(records, world_size=3, description={}, common_digest="")
    assert [shard.rank for shard in merged.shards] == [0, 1, 2]


def test_a_commit_that_times_out_names_the_missing_ranks(node: Node, root: Path) -> None:
    config = node.config(commit_timeout_s=1.0)
    trainers = [node.trainer(root, rank, 4, config=config) for rank in (0, 2)]
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(1, save_id)
    for trainer in trainers:
        outcome = trainer.outcome()
        assert outcome.seconds >= 1.0
        assert outcome.error is not None
        assert str(root / file_names.iteration_dir(1)) in outcome.error
        assert file_names.record_name(1, save_id) in outcome.error
        assert file_names.record_name(3, save_id) in outcome.error
        assert file_names.record_name(0, save_id) not in outcome.error
        assert "the commit records of 2 of 4 ranks" in outcome.error
        assert "agent.commit_timeout_s" in outcome.error
    assert files_of_ours(root) == []


def test_a_node_without_rank_0_waits_for_the_manifest_until_the_timeout(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root, 1, 2, config=node.config(commit_timeout_s=1.0))
    save_id = new_save_id()
    trainer.stage(1, save_id)
    error = trainer.outcome().error
    assert error is not None
    assert "manifest.json from the node of rank 0" in error
    # The node of rank 0 may still commit these files. Otherwise its sweep removes them.
    assert set(files_of_ours(root)) == {
        f"{file_names.iteration_dir(1)}/{name}"
        for name in (file_names.record_name(1, save_id), file_names.shard_name(1, save_id))
    }


# ---------------------------------------------------------------------- the same iteration again


def test_a_repeated_save_replaces_the_committed_attempt_only_by_its_commit(
    node: Node, root: Path
) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    first, second = new_save_id(), new_save_id()
    for trainer in trainers:
        trainer.stage(5, first)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    directory = root / file_names.iteration_dir(5)
    before = (directory / file_names.MANIFEST).read_bytes()
    # Otherwise the sweep removes the file that blocks the shard, because no save has that file.
    eventually("the removal of commit records", lambda: not list(directory.glob("*.commit")))
    with blocked_open(directory / file_names.shard_name(1, second)) as unblock:
        for trainer in trainers:
            trainer.stage(5, second)
        eventually(
            "the commit record of rank 0", (directory / file_names.record_name(0, second)).exists
        )
        assert (directory / file_names.MANIFEST).read_bytes() == before
        assert_intact(root, 5, trainers)
        unblock()
        assert [trainer.outcome().error for trainer in trainers] == [None, None]
    assert stored(root, 5).manifest.save_id == second
    assert_intact(root, 5, trainers)
    whole = {
        file_names.MANIFEST,
        file_names.common_name(second),
        file_names.shard_name(0, second),
        file_names.shard_name(1, second),
    }
    eventually(
        "the end of the first attempt", lambda: {path.name for path in directory.iterdir()} == whole
    )


def test_a_failed_attempt_leaves_the_committed_one_of_its_iteration(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    first, second = new_save_id(), new_save_id()
    assert trainer.save(5, first).error is None
    (root / file_names.iteration_dir(5) / file_names.shard_name(0, second)).mkdir()
    assert trainer.save(5, second).error is not None
    assert stored(root, 5).manifest.save_id == first
    assert_intact(root, 5, [trainer])


def test_an_older_attempt_that_ends_last_does_not_replace_the_newer_one(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    older, newer = new_save_id(), new_save_id()
    with blocked_open(
        root / file_names.iteration_dir(5) / file_names.shard_name(0, older)
    ) as unblock:
        trainer.stage(5, older)
        trainer.stage(5, newer)
        outcome = trainer.outcome()
        assert (outcome.save_id, outcome.error) == (newer, None)
        unblock()
        outcome = trainer.outcome()
    assert outcome.save_id == older
    assert outcome.error is not None
    assert "later save of the same iteration" in outcome.error
    assert stored(root, 5).manifest.save_id == newer
    assert_intact(root, 5, [trainer])
    eventually(
        "the removal of the older attempt",
        lambda: not [name for name in files_of_ours(root) if older in name],
    )


def test_foreign_files_stay_in_the_iteration_directory(node: Node, root: Path) -> None:
    directory = root / file_names.iteration_dir(5)
    foreign = [
        "notes.txt",
        ".hidden",
        "rank_00000.safetensors",
        "rank_00000-xyz.safetensors",
        f"rank_00000-{'a' * 12}.safetensors.bak",
        "model-00001-of-00002.safetensors",
        "mp_rank_00/model_optim_rng.pt",
    ]
    for name in foreign:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    ours = [f"rank_{'0' * 5}-{'a' * 12}.{kind}" for kind in ("safetensors", "commit", "failed")]
    for name in ours:
        (directory / name).write_text("of an attempt that failed")
    assert node.trainer(root).save(5).error is None
    eventually(
        "the removal of our files", lambda: not any((directory / name).exists() for name in ours)
    )
    assert [(directory / name).read_text() for name in foreign] == foreign


# ---------------------------------------------------------------------- tracker and retention


def test_an_older_save_that_ends_last_leaves_tracker_and_newer_checkpoint(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    earlier = new_save_id()
    with blocked_open(
        root / file_names.iteration_dir(10) / file_names.shard_name(0, earlier)
    ) as unblock:
        trainer.stage(10, earlier)
        trainer.stage(20, new_save_id())
        assert trainer.outcome().iteration == 20
        unblock()
        outcome = trainer.outcome()
    assert (outcome.iteration, outcome.error) == (10, None)
    assert_intact(root, 20, [trainer])
    expected = content(0, 10, trainer.layout.nbytes)
    assert read_rank(stored(root, 10), trainer) == expected


def test_training_that_resumes_from_an_older_checkpoint_moves_the_tracker_back(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    for iteration in (10, 20):
        assert trainer.save(iteration).error is None
    trainer.hang_up()
    again = node.trainer(root)
    again.client.resume_from(None, 10)
    assert again.save(15).error is None
    assert_intact(root, 15, [again])


@pytest.mark.parametrize(
    ("interval", "kept"),
    [
        (None, [10, 20, 25, 30, 40, 45]),
        (20, [20, 40, 45]),
        (10, [10, 20, 30, 40, 45]),
        (7, [45]),
        (1, [10, 20, 25, 30, 40, 45]),
    ],
)
def test_the_previous_checkpoint_stays_only_at_multiples_of_the_retain_interval(
    node: Node, root: Path, interval: int | None, kept: list[int]
) -> None:
    trainer = node.trainer(root, retain_interval=interval)
    for iteration in (10, 20, 25, 30, 40, 45):
        assert trainer.save(iteration).error is None
    eventually("the removal of the other checkpoints", lambda: iterations_in(root) == kept)
    for iteration in kept:
        expected = content(0, iteration, trainer.layout.nbytes)
        assert read_rank(stored(root, iteration), trainer) == expected


@pytest.mark.parametrize(("interval", "kept"), [(100, [30]), (20, [20, 30])])
def test_retention_applies_to_a_save_that_commits_after_a_later_one(
    node: Node, root: Path, interval: int, kept: list[int]
) -> None:
    trainer, save_id = node.trainer(root, retain_interval=interval), new_save_id()
    with blocked_open(
        root / file_names.iteration_dir(20) / file_names.shard_name(0, save_id)
    ) as unblock:
        trainer.stage(20, save_id)
        assert trainer.save(30).iteration == 30
        unblock()
        assert trainer.outcome().error is None
    assert (root / file_names.TRACKER).read_text() == "30"
    eventually("the removal of the other checkpoints", lambda: iterations_in(root) == kept)


def test_only_the_checkpoint_that_the_tracker_named_is_deleted(node: Node, root: Path) -> None:
    for name in ("iter_0000003", "iter_0000004", "release", "tensorboard"):
        (root / name).mkdir(parents=True)
        (root / name / "notes.txt").touch()
    trainer = node.trainer(root, retain_interval=100)
    for iteration in (5, 5, 6):
        assert trainer.save(iteration).error is None
    expected = {
        *("iter_0000003", "iter_0000004", "iter_0000006"),
        *("release", "tensorboard", file_names.TRACKER, file_names.HISTORY),
    }
    eventually(
        "the removal of checkpoint 5", lambda: {path.name for path in root.iterdir()} == expected
    )


def test_a_symlink_in_place_of_an_iteration_directory_is_left_alone(
    node: Node, root: Path, tmp_path: Path
) -> None:
    trainer = node.trainer(root, retain_interval=100)
    assert trainer.save(10).error is None
    elsewhere = tmp_path / "elsewhere"
    (root / file_names.iteration_dir(10)).rename(elsewhere)
    (root / file_names.iteration_dir(10)).symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    assert trainer.save(20).error is None, "the save succeeds although the link stays"
    assert (root / file_names.iteration_dir(10)).is_symlink()
    assert sorted(elsewhere.iterdir()) == before
    assert_intact(root, 20, [trainer])


# ---------------------------------------------------------------------- the order of steps


class _RefusingStorage(PosixStorage):
    """Real storage that refuses to put one name, and records the order of its calls."""

    def __init__(self, root: Path, refused: str) -> None:
        super().__init__(root)
        self.refused = refused
        self.steps: list[str] = []

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        last = name.rpartition("/")[2]
        self.steps.append(last)
        if last == self.refused:
            raise StorageError(28, f"{name}: cannot write (No space left on device)")
        super().put(name, data, durable, guard)

    def delete(self, name: str) -> None:
        self.steps.append(f"delete {name.rpartition('/')[2]}")
        super().delete(name)


def test_a_commit_puts_shards_then_manifest_then_tracker_then_tidies(
    root: Path,
) -> None:
    storage = _RefusingStorage(root, "nothing")
    save = persisted(storage, "a" * 12)
    commit(save)
    tidy(CommittedSave.of(save))
    record = file_names.record_name(0, "a" * 12)
    assert storage.steps == [
        record,
        file_names.common_name("a" * 12),
        file_names.MANIFEST,
        file_names.TRACKER,
        f"delete {record}",
    ]


@pytest.mark.parametrize(
    "refused", [file_names.common_name("a" * 12), file_names.MANIFEST, file_names.TRACKER]
)
def test_a_commit_that_fails_midway_never_moves_the_tracker(root: Path, refused: str) -> None:
    storage = _RefusingStorage(root, refused)
    finished, error = outcome_of(persisted(storage, "a" * 12), 60.0)
    assert finished
    assert error is not None
    assert refused in error
    assert not (root / file_names.TRACKER).exists()
    assert (root / file_names.iteration_dir(5) / file_names.MANIFEST).exists() == (
        refused == file_names.TRACKER
    )


def test_the_manifest_names_the_digest_of_the_common_state(root: Path) -> None:
    commit(persisted(_RefusingStorage(root, "nothing"), "a" * 12))
    common = (root / file_names.iteration_dir(5) / file_names.common_name("a" * 12)).read_bytes()
    assert stored(root, 5).manifest.common_digest == xxhash.xxh3_64_hexdigest(common)


def test_a_commit_that_fails_at_the_manifest_leaves_the_former_attempt_loadable(root: Path) -> None:
    commit(persisted(_RefusingStorage(root, "nothing"), "a" * 12))
    with pytest.raises(StorageError):
        commit(persisted(_RefusingStorage(root, file_names.MANIFEST), "b" * 12))
    assert stored(root, 5).manifest.save_id == "a" * 12
    assert stored(root, 5).common() == b"a" * 12


# ---------------------------------------------------------------------- after a restart


def test_a_restarted_rank_gets_no_results_from_its_former_process(node: Node, root: Path) -> None:
    """Otherwise the save that the crash cut short would stop the job after a successful restart."""
    config = node.config(commit_timeout_s=1.0)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    cut_short = new_save_id()
    trainers[0].stage(1, cut_short)
    for trainer in trainers:
        trainer.hang_up()
    again: list[FakeTrainer] = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    results = again[0].client.poll(1.5)
    assert (results.finished, results.pending) == ((), 0)
    eventually("the end of the save that was cut short", lambda: files_of_ours(root) == [])
    save_id = new_save_id()
    for trainer in again:
        trainer.stage(1, save_id)
    assert [trainer.outcome().save_id for trainer in again] == [save_id] * 2
    assert is_alive(again[0].client.agent_pid)


def test_a_resume_gives_up_a_save_that_a_crash_cut_short(node: Node, root: Path) -> None:
    """The slot is emptied and the shards are removed at once, not after the commit timeout."""
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    kept, cut_short = new_save_id(), new_save_id()
    for trainer in trainers:
        trainer.stage(1, kept)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    trainers[0].stage(2, cut_short)
    for trainer in trainers:
        trainer.hang_up()
    again: list[FakeTrainer] = [node.trainer(root, rank, 2) for rank in range(2)]
    for trainer in again:
        trainer.client.resume_from(kept, 1)
    shard = root / file_names.iteration_dir(2) / file_names.shard_name(0, cut_short)
    eventually("the removal of its shard", lambda: not shard.exists())

    def offered() -> list[str]:
        slab, offers = again[0].client.take()
        if slab is not None:
            slab.close()
        return [offer.save_id for offer in offers]

    eventually("the slot of the abandoned save is emptied", lambda: offered() == [kept])
    assert (root / file_names.TRACKER).read_text() == "1"
