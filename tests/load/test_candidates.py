"""Order of the checkpoints in memory and storage that a load tries if one is damaged."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.catalog.directory import put_tracked
from megatron_flashckpt.catalog.lineage import Save, Tracked
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    FlashCkptError,
    FormatVersionError,
    MissingStateError,
    NotCommittedError,
    RenamedCheckpointError,
    StorageError,
)
from megatron_flashckpt.file_format.file_names import (
    RELEASE,
    TRACKED,
    TRACKER,
    end_name,
    iteration_dir,
    run_file,
    run_name,
    save_name,
)
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject, encode_run
from megatron_flashckpt.load import resume
from megatron_flashckpt.load.candidates import Candidates
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.memory_checkpoints import HeldInMemory, MemoryCheckpoint
from megatron_flashckpt.load.named_checkpoint import (
    loadable_saves,
    offered_by,
    refuse_path_inside,
)
from megatron_flashckpt.load.offers import HeldSave
from megatron_flashckpt.load.storage_source import open_stored
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.checkpoints import make
from tests.support.memory_store import MemoryStore

DAMAGE = CorruptCheckpointError("rank 3: a file: digest 1, expected 2")
RUN = run_name(1, "aaaa")


def saved(iteration: int, run: str = RUN) -> Save:
    return Save(iteration, save_name(run, iteration))


def held(iteration: int, run: str = RUN) -> MemoryCheckpoint:
    """Return a checkpoint in memory."""
    slab: Any = None
    return MemoryCheckpoint(slab, Offer(0, iteration, saved(iteration, run).save_id, False, None))


def track(store: PosixStore, iteration: int) -> None:
    """Write tracker and `tracker.json` as an agent does."""
    store.put(TRACKER, b"%d" % iteration)
    put_tracked(store, Tracked(iteration, saved(iteration).save_id))


def remove(store: PosixStore, iteration: int) -> None:
    name = end_name(saved(iteration).save_id)
    store.delete([f"{iteration_dir(iteration)}/{name}"])


@pytest.fixture
def storage(tmp_path: Path) -> PosixStore:
    """A store in which one run has committed iterations 2, 4 and 6; the tracker names 6."""
    store = PosixStore(tmp_path)
    store.create(run_file(1), encode_run(RunObject(name=RUN)))
    for iteration in (2, 4, 6):
        name = end_name(saved(iteration).save_id)
        store.create(f"{iteration_dir(iteration)}/{name}", b"a manifest")
    track(store, 6)
    return store


def opened(
    store: PosixStore, memory: list[MemoryCheckpoint], *, rank: int = 0, fall_back: bool = True
) -> Candidates:
    ancestors = {checkpoint.save: checkpoint.ancestors for checkpoint in memory}
    return Candidates(
        lambda: offered_by(store, None, ancestors)[1],
        HeldInMemory(memory),
        store.place,
        rank=rank,
        fall_back=fall_back,
    )


def tried(
    storage: PosixStore,
    memory: list[MemoryCheckpoint],
    errors: dict[str, FlashCkptError],
    *,
    fall_back: bool = True,
) -> list[str]:
    """Return the checkpoints that a load tries, in order. Loads fail for the names in `errors`."""
    candidates = opened(storage, memory, fall_back=fall_back)
    order = []
    while (current := candidates.current) is not None:
        name = (
            f"memory {current.offer.iteration}"
            if isinstance(current, MemoryCheckpoint)
            else str(current.iteration)
        )
        order.append(name)
        if name not in errors:
            candidates.report()
            break
        candidates.refuse(errors[name])
    return order


@pytest.mark.parametrize(
    ("memory", "damaged", "order"),
    [
        ([], [], ["6"]),
        ([], ["6"], ["6", "4"]),
        ([], ["6", "4"], ["6", "4", "2"]),
        ([held(6), held(4)], [], ["memory 6"]),
        # Memory is damaged; storage has the same iteration, so no iteration is lost.
        ([held(6), held(4)], ["memory 6"], ["memory 6", "6"]),
        ([held(6), held(4)], ["memory 6", "6"], ["memory 6", "6", "memory 4"]),
        ([held(6), held(4)], ["memory 6", "6", "memory 4"], ["memory 6", "6", "memory 4", "4"]),
        # Iteration 8 was staged but never committed, so storage lacks it.
        ([held(8), held(6)], ["memory 8"], ["memory 8", "memory 6"]),
        # Training fell back from 6 to 4 and crashed after it had staged 5. If 6 is damaged again,
        # iteration 5 comes next.
        ([held(5), held(4)], ["6"], ["6", "memory 5"]),
        # Memory still holds iterations that retention has removed from storage.
        ([held(5), held(3)], ["6"], ["6", "memory 5"]),
        ([held(5), held(3)], ["6", "memory 5", "4"], ["6", "memory 5", "4", "memory 3"]),
    ],
)
def test_the_newest_intact_checkpoint_in_memory_or_storage_is_used(
    storage: PosixStore, memory: list[MemoryCheckpoint], damaged: list[str], order: list[str]
) -> None:
    assert tried(storage, memory, dict.fromkeys(damaged, DAMAGE)) == order


def test_a_tracker_that_names_no_checkpoint_falls_back_to_the_newest(
    storage: PosixStore, caplog: pytest.LogCaptureFixture
) -> None:
    storage.put(TRACKER, b"8")
    assert tried(storage, [], {}) == ["6"]
    assert "iteration 8 in storage: " in caplog.messages[-1]
    assert "at most 2 iterations are lost" in caplog.messages[-1]
    with pytest.raises(NotCommittedError):
        tried(storage, [], {}, fall_back=False)
    # Memory has it.
    assert tried(storage, [held(8)], {}, fall_back=False) == ["memory 8"]
    storage.put(TRACKER, b"?")
    assert tried(storage, [], {}) == ["6"]
    with pytest.raises(CorruptCheckpointError, match="is no iteration; write 6 "):
        tried(storage, [], {}, fall_back=False)
    # Without any checkpoint, training does not start anew.
    for iteration in (2, 4, 6):
        remove(storage, iteration)
    storage.put(TRACKER, b"8")
    with pytest.raises(NotCommittedError, match="iter_0000008"):
        tried(storage, [], {})


def test_what_is_removed_while_it_loads_is_chosen_anew(
    storage: PosixStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A job's janitor has removed the checkpoint after the choice. That is no damage."""
    candidates = opened(storage, [], fall_back=False)
    assert candidates.current == saved(6)
    remove(storage, 6)
    storage.create(f"{iteration_dir(5)}/{end_name(saved(5).save_id)}", b"a manifest")
    track(storage, 5)
    with pytest.raises(NotCommittedError) as caught:
        open_stored(storage, saved(6), Config())
    candidates.refuse(caught.value)
    assert candidates.current == saved(5)
    candidates.report()
    assert "DAMAGED" not in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        MissingStateError("another model"),
        FormatVersionError("of the future"),
        StorageError(13, "permission denied"),
        FlashCkptError("rank 1: OutOfMemoryError: CUDA out of memory"),
        DAMAGE,
    ],
    ids=lambda error: type(error).__name__,
)
def test_only_damage_costs_iterations_and_only_if_the_job_may_lose_them(
    storage: PosixStore, tmp_path: Path, error: FlashCkptError
) -> None:
    def raised(
        store: PosixStore, memory: list[MemoryCheckpoint], name: str, *, fall_back: bool = True
    ) -> FlashCkptError | None:
        try:
            tried(store, memory, {name: error}, fall_back=fall_back)
        except FlashCkptError as caught:
            return caught
        return None

    unless_damage = None if error is DAMAGE else error
    assert raised(storage, [], "6") is unless_damage
    assert raised(storage, [], "6", fall_back=False) is error
    assert raised(storage, [held(8)], "memory 8", fall_back=False) is error
    order = tried(storage, [held(6)], {"memory 6": error}, fall_back=False)
    assert order == ["memory 6", "6"]
    # After another error in memory, the load tries storage, and no other checkpoint in memory.
    order = tried(storage, [held(9), held(8)], {"memory 9": error})
    assert order == ["memory 9", "memory 8" if error is DAMAGE else "6"]
    empty = PosixStore(tmp_path / "empty")
    empty.create(run_file(1), encode_run(RunObject(name=RUN)))
    assert raised(empty, [held(6)], "memory 6") is unless_damage


def test_if_all_checkpoints_are_damaged_the_error_names_each(storage: PosixStore) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        tried(storage, [], dict.fromkeys("642", DAMAGE))
    for iteration in (6, 4, 2):
        assert f"\n  {iteration} in storage: rank 3: a file: digest 1" in str(caught.value)


def test_the_report_names_damage_place_and_loss(
    storage: PosixStore, caplog: pytest.LogCaptureFixture
) -> None:
    tried(storage, [held(6)], {"memory 6": DAMAGE, "6": DAMAGE})
    block = caplog.messages[-1]
    assert f"DAMAGED CHECKPOINT in {storage.place}\n" in block
    assert "iteration 6 in memory: rank 3: a file" in block
    assert "iteration 6 in storage: rank 3: a file" in block
    assert "RESUMES FROM ITERATION 4 in storage: 2 iterations are lost" in block
    caplog.clear()
    candidates = opened(storage, [], rank=1)
    candidates.refuse(DAMAGE)
    candidates.report()
    assert caplog.messages == [], "another rank than 0 logs the report"


def test_a_commit_that_no_tracker_names_counts(storage: PosixStore) -> None:
    """The first commit's agent died before it wrote the tracker."""
    storage.delete([TRACKER, TRACKED])
    assert tried(storage, [], {}) == ["6"]
    remove(storage, 6)
    name = end_name(saved(0).save_id)
    for iteration in (2, 4):
        remove(storage, iteration)
    storage.create(f"{iteration_dir(0)}/{name}", b"a manifest")
    assert opened(storage, []).iteration == 0


def test_a_job_that_ignores_existing_checkpoints_logs_a_warning(
    storage: PosixStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / TRACKER).unlink()
    with caplog.at_level(logging.WARNING):
        assert opened(storage, [held(6)]).current is None
    assert "to resume from the newest, write 6 into that file" in caplog.text
    assert "is not used: the tracker was removed" in caplog.text


def test_a_tracker_of_another_history_is_named_in_the_log(
    storage: PosixStore, caplog: pytest.LogCaptureFixture
) -> None:
    second = run_name(2, "bbbb")
    run = RunObject(name=second, ancestors=(Ancestor(RUN, 2),))
    storage.create(run_file(2), encode_run(run))
    assert opened(storage, []).current == saved(2)
    assert "start with --ckpt-step 6" in caplog.text


def test_a_renamed_directory_stops_the_load_with_the_name_that_it_needs(tmp_path: Path) -> None:
    """An older checkpoint is not what the person wants who named this directory."""
    make(tmp_path, 2, save_name(RUN, 1))
    make(tmp_path, 4, save_name(RUN, 2))
    (tmp_path / iteration_dir(4)).rename(tmp_path / iteration_dir(100))
    (tmp_path / TRACKER).write_text("100")
    store = PosixStore(tmp_path)
    candidates = opened(store, [])
    assert candidates.iteration == 100
    with pytest.raises(RenamedCheckpointError, match="rename it to iter_0000004") as caught:
        open_stored(store, Save(100, save_name(RUN, 2)), Config())
    with pytest.raises(RenamedCheckpointError):
        candidates.refuse(caught.value)


def test_a_release_that_is_gone_is_replaced_by_memory_only(storage: PosixStore) -> None:
    """Before, the newest iteration was loaded with all its state."""
    storage.put(TRACKER, b"release")
    with pytest.raises(NotCommittedError, match=r"release: is missing, although .* names it"):
        opened(storage, [])
    assert tried(storage, [held(8)], {}) == ["memory 8"]


@pytest.mark.parametrize("fall_back", [True, False])
def test_a_copy_under_another_name_costs_nothing_but_a_new_name_what_lies_between(
    storage: PosixStore, fall_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    storage.create(f"{iteration_dir(8)}/{end_name(saved(6).save_id)}", b"a manifest")
    errors = {"8": RenamedCheckpointError("iter_0000008: holds iteration 6")}
    assert tried(storage, [], errors, fall_back=fall_back) == ["8", "6"]
    assert "iter_0000008: holds iteration 6; it is not loaded" in caplog.text
    assert "DAMAGED" not in caplog.text
    if fall_back:
        remove(storage, 6)
        assert tried(storage, [], errors) == ["8", "4"]
        assert "RESUMES FROM ITERATION 4 in storage: at most 2 iterations are lost" in caplog.text


def test_a_directory_that_is_a_link_is_loaded_only_if_it_is_what_it_says(tmp_path: Path) -> None:
    save, away = tmp_path / "save", tmp_path / "away"
    make(save, 2, save_name(RUN, 1))
    make(away, 4, save_name(RUN, 2))
    store = PosixStore(save)
    (save / iteration_dir(4)).symlink_to(away / iteration_dir(4))
    assert opened(store, []).iteration == 2
    (save / TRACKER).write_text("4")
    assert opened(store, []).iteration == 4
    (save / iteration_dir(9)).symlink_to(iteration_dir(2))
    (save / TRACKER).write_text("9")
    with pytest.raises(RenamedCheckpointError, match="holds iteration 2"):
        opened(store, [])


def test_our_checkpoint_under_the_name_release_is_loaded_if_the_tracker_says_so(
    tmp_path: Path,
) -> None:
    """A load takes only the weights of a release; an older checkpoint has no use for it."""
    make(tmp_path, 2, save_name(RUN, 1))
    make(tmp_path, 4, save_name(RUN, 2))
    (tmp_path / iteration_dir(4)).rename(tmp_path / "release")
    store = PosixStore(tmp_path)
    (tmp_path / TRACKER).write_text("2")
    assert opened(store, []).iteration == 2
    (tmp_path / TRACKER).write_text("release")
    candidates = opened(store, [])
    assert candidates.iteration == RELEASE
    assert open_stored(store, Save(RELEASE, save_name(RUN, 2)), Config()).origin.is_release
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        candidates.refuse(CorruptCheckpointError("damaged"))


def test_a_step_offers_one_checkpoint(storage: PosixStore) -> None:
    assert loadable_saves(storage, 4) == [saved(4)]
    assert loadable_saves(storage, None) == [saved(6), saved(4), saved(2)]
    with pytest.raises(NotCommittedError, match="iter_0000005"):
        loadable_saves(storage, 5)


def test_a_checkpoint_of_another_program_is_left_to_megatron(storage: PosixStore) -> None:
    storage.create("iter_0000009/metadata.json", b"{}")
    assert opened(storage, []).current == saved(6)
    storage.put(TRACKER, b"9")
    candidates = opened(storage, [held(8)])
    assert candidates.current is None
    assert candidates.other_program == Save(9, "")
    assert loadable_saves(storage, None) == []


def refuse(path: Path) -> None:
    refuse_path_inside(str(path), PosixStore(path))


def test_a_load_from_inside_a_save_directory_is_refused_with_the_right_flags(
    tmp_path: Path,
) -> None:
    """Megatron starts from scratch then, and its first save moves the tracker back."""
    made = make(tmp_path, 4)
    inside = tmp_path / iteration_dir(4)
    flags = f"--load {tmp_path} --ckpt-step 4"
    with pytest.raises(ConfigError, match=f"is one checkpoint, .*{flags}"):
        refuse(inside)
    with pytest.raises(ConfigError, match="is a file; name the directory"):
        refuse(made.manifest)
    refuse(tmp_path)
    refuse(tmp_path / "missing")
    own = tmp_path / "iter_0000009"
    own.mkdir()
    (own / TRACKER).write_text("4")
    refuse(own)
    url = "s3://bucket/save/iter_0000004"
    bucket = MemoryStore(url)
    refuse_path_inside(url, bucket)
    bucket.put("file", b"")
    with pytest.raises(ConfigError, match="--load s3://bucket/save --ckpt-step 4"):
        refuse_path_inside(url, bucket)


def test_one_checkpoint_is_refused_under_any_name(tmp_path: Path) -> None:
    """Before, only directories with the name of an iteration were."""
    save = tmp_path / "save"
    make(save, 4)
    (tmp_path / "best").symlink_to(save / iteration_dir(4))
    with pytest.raises(ConfigError, match=f"start with --load {save} --ckpt-step 4"):
        refuse(tmp_path / "best")
    release = save / iteration_dir(RELEASE)
    (save / iteration_dir(4)).rename(release)
    with pytest.raises(ConfigError, match=f"write 'release' into {save}/{TRACKER}"):
        refuse(release)
    release.rename(tmp_path / "base")
    with pytest.raises(ConfigError, match=f"rename it to {tmp_path}/iter_NNNNNNN"):
        refuse(tmp_path / "base")
    megatrons = tmp_path / "megatrons"
    (megatrons / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is one checkpoint"):
        refuse(megatrons)


def test_a_directory_that_cannot_be_examined_is_left_to_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load waits until the error passes."""

    def fail(path: object, **_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr("os.stat", fail)
    refuse(tmp_path)


#: A save in memory of which rank 1 lacks its part.
TORN = HeldInMemory((), (HeldSave(5, saved(5).save_id, 2, {}, (1,)),))


def test_an_incomplete_save_in_memory_is_older_than_no_pretrained_model(
    storage: PosixStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, nothing was said if the pretrained model had trained for more iterations."""
    candidates = Candidates(
        lambda: offered_by(storage, None)[1],
        TORN,
        "/models/base",
        rank=0,
        fall_back=False,
        begins_anew=True,
    )
    candidates.report()
    (line,) = caplog.messages
    assert line.startswith("iteration 5 in host memory, saved by 2 ranks, is incomplete")
    assert line.endswith("; training begins anew with the weights in /models/base")


def test_a_pretrained_model_replaces_no_save_that_another_number_of_ranks_can_load(
    tmp_path: Path,
) -> None:
    call: Any = SimpleNamespace(
        directory=str(tmp_path), policy=LoadPolicy(pretrained="/models/base"), config=Config()
    )
    with pytest.raises(MissingStateError, match="Start the job with 2 ranks"):
        resume._with_directory(call, TORN)


def test_a_tracker_that_is_no_file_keeps_a_load_from_a_pretrained_model(tmp_path: Path) -> None:
    """As any other tracker does; the load then takes the newest checkpoint of the job."""
    (tmp_path / TRACKER).symlink_to("nowhere")
    call: Any = SimpleNamespace(
        directory=str(tmp_path), policy=LoadPolicy(pretrained="/models/base"), config=Config()
    )
    assert resume._with_directory(call, HeldInMemory()) == (call, HeldInMemory())
