"""Real agents on faulty storage: transient errors break no save, lasting errors break one save."""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.error_classes import TABLE, class_of
from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, files_of_ours, save_all
from tests.faulty_storage.preload import FaultyStorage, append_only, fail, no_fallocate
from tests.support.trainer import eventually, new_save_id

#: Error numbers of network file systems in trouble.
PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN, errno.ESHUTDOWN)
#: The calls of a save in order, with part of the path of the file.
STEPS = [
    ("mkdir", "{iteration}"),
    ("open", "safetensors"),
    ("fallocate", "safetensors"),
    ("write", "safetensors"),
    ("fsync", "safetensors"),
    ("close", "safetensors"),
    ("fsync", "{iteration}"),
    ("write", ".record"),
    ("close", ".record"),
    ("link", ".record"),
    ("stat", ".end"),
    ("list", "{iteration}"),
    ("open", ".record"),
    ("read", ".record"),
    ("stat", "safetensors"),
    ("write", "common"),
    ("fsync", "common"),
    ("link", "common"),
    ("open", ".end"),
    ("write", ".end"),
    ("close", ".end"),
    ("link", ".end"),
    ("fsync", file_names.TRACKER),
    ("rename", file_names.TRACKER),
]


@pytest.fixture
def faulty(root: Path, tmp_path: Path, node: Node) -> Iterator[FaultyStorage]:
    made = FaultyStorage(root, tmp_path)
    with made.under_agents():
        yield made
        made.heal()


def files_open(node: Node, root: Path) -> list[str]:
    """Return the files below `root` that agents have open."""
    fds = [fd for pid in node.agents() for fd in Path(f"/proc/{pid}/fd").iterdir()]
    opened = []
    for fd in fds:
        try:
            opened.append(os.readlink(fd))
        except FileNotFoundError:  # the file was closed after the listing
            continue
    return sorted(path for path in opened if path.startswith(f"{root}/"))


@pytest.mark.parametrize("done", [False, True], ids=["refused", "done but reported"])
def test_a_transient_error_at_any_call_breaks_no_save(
    node: Node, root: Path, faulty: FaultyStorage, done: bool
) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    steps = STEPS if not done else [step for step in STEPS if step[0] in ("link", "mkdir")]
    for iteration, (call, part) in enumerate(steps, 1):
        number = PASSING[iteration % len(PASSING)]
        part = part.format(iteration=file_names.iteration_dir(iteration))
        faulty.rule(fail(call, number, part, times=1, done=done))
        fault = f"{errno.errorcode[number]} at {call} of {part}"
        assert save_all(trainers, iteration) == [None, None], fault
        eventually(f"{fault} is hit", lambda: len(faulty.hits()) >= iteration)  # noqa: B023
        hits = faulty.hits()
        assert len(hits) == iteration, f"{fault} came more than once"
        assert (hits[-1].call, hits[-1].number) == (call, number)
        assert {hit.pid for hit in hits} <= set(node.agents())
        assert_intact(root, iteration, trainers)
        eventually("all files are closed", lambda: not files_open(node, root))


#: Errors that no retry can repair, by their location.
LASTING = {
    "a full disk": ("write", errno.ENOSPC, "safetensors"),
    "no room for the file": ("fallocate", errno.ENOSPC, "safetensors"),
    "a quota, seen when the file is closed": ("close", errno.EDQUOT, "safetensors"),
    "a full disk, seen when the file is closed": ("close", errno.ENOSPC, "safetensors"),
    "read-only": ("open", errno.EROFS, "safetensors"),
    "no permission": ("mkdir", errno.EACCES, "iter_"),
    "a record that cannot be created": ("write", errno.EDQUOT, ".record"),
    "an end that cannot be created": ("link", errno.EDQUOT, ".end"),
    "common state that cannot be written": ("fsync", errno.ENOSPC, "common"),
    "records that cannot be listed": ("list", errno.EACCES, "iter_"),
}


def has_no_unknown_files(root: Path, before: list[str], kept: set[str]) -> bool:
    """Return whether all files existed before or belong to a kept checkpoint."""
    new = [file for file in files_of_ours(root) if file not in before]
    return all(file.partition("/")[0] in kept for file in new)


def test_a_lasting_error_fails_only_its_save_with_a_true_message(
    node: Node, root: Path, faulty: FaultyStorage
) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    trainers[1].join(trainers[0].open_run())
    assert save_all(trainers, 1) == [None, None]
    durable = 1
    for name, (call, number, part) in LASTING.items():
        before = files_of_ours(root)
        faulty.rule(fail(call, number, part))
        errors = save_all(trainers, durable + 1)
        for error in errors:  # a rank that staged later has an error of its own
            assert error is not None, name
            assert str(root / file_names.iteration_dir(durable + 1)) in error, name
            assert os.strerror(number) in error, name
            assert error.endswith(class_of(number).remedy), name
        assert (root / file_names.TRACKER).read_text() == str(durable)
        # The other rank may still be writing.
        eventually(f"all files are closed: {name}", lambda: files_open(node, root) == [])
        faulty.heal()
        assert_intact(root, durable, trainers)
        # More saves than slots are made, because a failure must not lose a slot.
        for _ in range(2):
            durable += 2
            assert save_all(trainers, durable) == [None, None], name
            assert_intact(root, durable, trainers)
        kept = {file_names.iteration_dir(number) for number in (durable, durable - 2)}
        # Files that could not be listed are removed after two later commits.
        gone = functools.partial(has_no_unknown_files, root, before, kept)
        eventually(f"the removal of other files after: {name}", gone)
    log = node.log(root).read_text()
    # A rank that stages after the failure of the other gets the same result for a separate save.
    failed = set(re.findall(r"iteration (\d+) was not saved: ", log))
    assert len(failed) == len(LASTING)


def test_a_failure_on_a_full_disk_is_proposed_until_there_is_room(
    node: Node, other_node: Node, root: Path, faulty: FaultyStorage
) -> None:
    """The failed shard is removed a moment later; without the end, other nodes wait 30 minutes."""
    here, there = node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)
    faulty.rule(
        fail("fallocate", errno.ENOSPC, "rank_00000"),
        fail("write", errno.ENOSPC, ".end", times=1),
    )
    save_id = new_save_id()
    for trainer in (here, there):
        trainer.stage(1, save_id)
    errors = [trainer.outcome(60.0).error for trainer in (here, there)]
    assert errors[0] is not None
    assert "No space left on device" in errors[0]
    assert errors == [errors[0]] * 2
    assert [hit.call for hit in faulty.hits()].count("write") == 1


def test_a_file_system_without_fallocate_holds_checkpoints(
    node: Node, root: Path, faulty: FaultyStorage
) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    faulty.rule(no_fallocate())
    assert save_all(trainers, 1) == [None, None]
    assert_intact(root, 1, trainers)
    assert {hit.call for hit in faulty.hits()} == {"fallocate"}


def test_a_file_system_that_only_appends_fails_saves_with_the_reason(
    node: Node, root: Path, faulty: FaultyStorage
) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    faulty.rule(append_only(), no_fallocate())
    error = save_all(trainers, 1)[0]
    assert error is not None
    assert "writes at any position of a file" in error
    assert not (root / file_names.TRACKER).exists()
    eventually("all files are closed", lambda: not files_open(node, root))


def test_the_table_marks_every_transient_error() -> None:
    assert all(TABLE[number].may_pass for number in PASSING)
