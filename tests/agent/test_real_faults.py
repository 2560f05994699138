"""Real agents on faulty storage: transient errors break no save, lasting errors break one save."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.error_classes import class_of
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.faulty_storage.preload import FaultyStorage, fail
from tests.support.agents import agent_here
from tests.support.processes import open_files
from tests.support.stored import assert_intact, files_of_ours
from tests.support.trainer import (
    blocked_shard,
    eventually,
    new_save_id,
    remove_tree,
    save_all,
)

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
    opened = [path for pid in node.agents() for path in open_files(pid)]
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


# ---------------------------------------------------------------------- two nodes


def test_a_full_disk_counts_as_lasting_on_all_nodes(
    node: Node, other_node: Node, root: Path, tmp_path: Path
) -> None:
    """The other node learns it from the end of the save."""
    storage = FaultyStorage(root, tmp_path)
    with storage.under_agents():
        trainers = [node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)]
    save_id = new_save_id()
    storage.rule(fail("write", errno.ENOSPC, file_names.shard_name(1, save_id)))
    for trainer in trainers:
        trainer.stage(1, save_id)
    outcomes = [trainer.outcome() for trainer in trainers]
    assert all("[Errno 28]" in (outcome.error or "") for outcome in outcomes)
    assert [outcome.lasts for outcome in outcomes] == [True, True]


@pytest.mark.parametrize("writes", [0, 1])
def test_a_save_whose_directory_is_removed_with_the_part_of_one_node_fails_on_all(
    node: Node, other_node: Node, root: Path, writes: int
) -> None:
    """The other node is still writing, and makes the directory again."""
    places = enumerate((node, other_node))
    trainers = [
        place.trainer(root, rank, 2, config=place.config(commit_timeout_s=5.0))
        for rank, place in places
    ]
    trainers[1].join(trainers[0].open_run())
    assert save_all(trainers, 1) == [None, None]
    save_id, directory = trainers[0].new_save_id(), root / file_names.iteration_dir(2)
    with blocked_shard(root, 2, writes, save_id) as unblock:
        for trainer in trainers:
            trainer.stage(2, save_id)
        eventually("the record of the other node", lambda: list(directory.glob("*.record")))
        remove_tree(directory)
        unblock()
    for trainer in trainers:
        assert f"{directory}: gave up after 5 s: " in (trainer.outcome().error or "")
    assert save_all(trainers, 3) == [None, None]
    assert_intact(root, 3, trainers)


class _Away(PosixStore):
    """A store that cannot be reached."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise StorageError(errno.EHOSTDOWN, os.strerror(errno.EHOSTDOWN))

    get = put = create = writer = list = present = delete = stat = _refuse


@pytest.mark.parametrize("away", [0, 1])
@pytest.mark.usefixtures("impatient")
def test_a_node_without_storage_does_not_keep_the_others_waiting(
    node: Node, other_node: Node, root: Path, away: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot report the failure; each node ends the save at its own deadline."""
    save_id = new_save_id()
    with contextlib.ExitStack() as agents:
        trainers = []
        for rank, place in enumerate((node, other_node)):
            agent = agents.enter_context(agent_here(place, root, commit_timeout_s=3.0))
            if rank == away:
                monkeypatch.setattr(agent._node, "store_at", lambda _: _Away(root))
            trainers.append(place.trainer(root, rank, 2))
        for trainer in trainers:
            trainer.stage(1, save_id)
        errors = [trainer.outcome().error or "" for trainer in trainers]
        assert "Host is down" in errors[away]
        assert "gave up after 3 s" in errors[1 - away]
        monkeypatch.undo()
        assert save_all(trainers, 2) == [None, None]
        assert_intact(root, 2, trainers)
