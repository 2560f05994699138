"""The commit core at given moments: when it creates records, how it waits, when it gives up.

`test_commit_model` has the promises that hold for any order of events.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.agent.commit_core import CommitCore
from megatron_flashckpt.file_format.end import End, Failure
from megatron_flashckpt.storage.posix_store import PosixStore

TIMEOUT_S = 3600.0
NOBODY = core.Trainers()


def record(rank: int) -> Any:
    """Return what the machine asks of a record."""
    return SimpleNamespace(rank=rank)


def listed(*ranks: int) -> core.Looked:
    """Return what a listing shows that has a record of each rank."""
    return core.Looked({f"record of {rank}": range(rank, rank + 1) for rank in ranks})


def node_with(
    *ranks: int, durable: tuple[int, ...] = (), at: float = 0.0, world_size: int = 4
) -> CommitCore:
    """Return a save of a node with these ranks, of which some have written their shards."""
    machine = CommitCore("here", world_size, 0.0, TIMEOUT_S, PosixStore.pace)
    for rank in ranks:
        machine.note(0.0, core.Joined(rank))
    for rank in durable:
        machine.note(at, core.Durable(record(rank)))
    return machine


def recorded(*ranks: int, world_size: int = 4) -> CommitCore:
    """Return a save of a node whose ranks have their records."""
    machine = node_with(world_size=world_size)
    for rank in ranks:
        machine.note(0.0, core.Joined(rank, is_adopted=True))
        machine.note(0.0, core.Durable(record(rank)))
    machine.note(0.0, core.Recorded(frozenset(ranks)))
    return machine


# ---------------------------------------------------------------------- when records are due


@pytest.mark.parametrize(
    ("durable", "connected", "is_due"),
    [
        ((0, 1), (0, 1), True),
        ((0, 1), (0, 1, 4, 9), True),
        ((0, 1), (), True),
        ((0, 1), (0, 1, 2), False),
        ((0,), (0, 1), False),
    ],
    ids=[
        *("all are there", "others are of another job", "the trainers are gone"),
        *("rank 2 will stage in a moment", "rank 1 is being written"),
    ],
)
def test_records_wait_for_connected_and_writing_ranks_of_this_job(
    durable: tuple[int, ...], connected: tuple[int, ...], *, is_due: bool
) -> None:
    machine = node_with(0, 1, durable=durable)
    trainers = core.Trainers(frozenset(connected))
    assert isinstance(machine.next(0.0, trainers), core.WriteRecords) is is_due


@pytest.mark.parametrize(
    ("since_s", "wait_s"), [(0.0, 2.0), (8.0, 2.0), (24.0, 6.0), (40.0, 10.0), (900.0, 10.0)]
)
def test_a_longer_save_waits_longer_within_bounds(since_s: float, wait_s: float) -> None:
    machine = node_with(0, 1, durable=(0,), at=since_s)
    # A second shard does not extend the wait of the first.
    machine.note(since_s + wait_s - 0.2, core.Durable(record(1)))
    trainers = core.Trainers(frozenset({0, 1, 2}))
    assert not isinstance(machine.next(since_s + wait_s - 0.1, trainers), core.WriteRecords)
    assert isinstance(machine.next(since_s + wait_s, trainers), core.WriteRecords)


def test_a_save_that_has_failed_publishes_no_record() -> None:
    machine = node_with(0, 1, durable=(0,))
    machine.note(0.0, core.GivenUp(Failure(failed="no space")))
    machine.note(0.0, core.Durable(record(1)))
    assert machine.next(0.0, NOBODY) == core.Fail(Failure(failed="no space"), frozenset({0, 1}))


# ---------------------------------------------------------------------- waits, and their end


def waits(
    machine: CommitCore,
    until_s: float,
    answer: core.Observation,
    of_commit: core.Observation | None = None,
) -> list[core.Action]:
    """Return what a node does until a time, if storage always gives one answer.

    Args:
        of_commit: the answer to a proposed manifest; None: the same one.
    """
    now, actions = 0.0, []
    while now < until_s:
        action = machine.next(now, NOBODY)
        if isinstance(action, core.Wait):
            now = action.until
        elif isinstance(action, core.Conclude):
            return actions
        else:
            actions.append(action)
            is_commit = isinstance(action, core.Commit)
            machine.note(now, of_commit if is_commit and of_commit else answer)
    return actions


@pytest.mark.parametrize("rank", [0, 1])
def test_a_waiting_node_asks_for_one_name_once_a_second_at_most(rank: int) -> None:
    """Thousands of nodes ask one metadata server; only that of rank 0 lists the records."""
    answer = listed(0, 1) if rank == 0 else core.Looked()
    actions = waits(recorded(rank), 100.0, answer)
    assert set(actions) == {core.Look(records=rank == 0)}
    assert len(actions) < 110


def test_a_record_that_only_listings_show_is_asked_for_once_a_second_at_most() -> None:
    """A listing of NFS or of an object store may be older than what a read sees."""
    missing = core.Missing("record of 3")
    actions = waits(recorded(0), 100.0, listed(*range(4)), of_commit=missing)
    assert len(actions) < 110


def test_the_nodes_of_a_large_job_together_keep_to_the_rate_of_the_store() -> None:
    nodes, seconds = round(8 * PosixStore.pace.most_per_s), 100.0
    of_one = len(waits(recorded(1, world_size=nodes), seconds, core.Looked()))
    assert 1 < of_one <= 1 + PosixStore.pace.most_per_s * seconds / nodes


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("has_record", [True, False])
def test_the_node_of_rank_0_gives_up_after_20_s_and_the_others_wait_for_it(
    rank: int, *, has_record: bool
) -> None:
    machine = recorded(rank) if has_record else node_with(rank, durable=(rank,))
    actions = waits(machine, 500.0, core.Trouble("no answer", may_pass=True))
    proposes = any(isinstance(action, core.Fail) for action in actions)
    assert proposes == (rank == 0)
    assert isinstance(machine.next(500.0, NOBODY), core.Conclude) == (rank == 0)


@pytest.mark.parametrize(("may_pass", "until_s"), [(True, 40.0), (False, 5.0)])
def test_a_node_waits_so_long_for_an_end_that_storage_does_not_take(
    may_pass: bool, until_s: float
) -> None:
    """Its trainers hear then, and nothing is removed, because the end may exist."""
    machine = recorded(0, 1)
    machine.note(0.0, core.GivenUp(Failure(failed="no space")))
    machine.note(0.0, core.Trouble("hangs", may_pass))
    machine.note(until_s - 0.1, core.Trouble("hangs", may_pass))
    assert not isinstance(machine.next(until_s - 0.1, NOBODY), core.Conclude)
    assert machine.next(until_s + 0.1, NOBODY) == core.Conclude(None, Failure(failed="no space"))


def test_an_outage_fails_no_save_whose_shards_are_being_written() -> None:
    """The errors of the shards say which ranks have failed."""
    machine, outage = node_with(0, 1, durable=(0,)), core.Trouble("read-only", may_pass=False)
    machine.note(0.0, outage)
    assert not machine.is_over
    machine.note(1.0, core.Durable(record(1)))
    machine.note(1.0, outage)
    assert machine.is_over


def test_nothing_that_is_seen_later_replaces_a_known_end() -> None:
    """The trainers hear the end, also if storage hangs before its name is durable."""
    machine, ended = recorded(*range(4)), core.Ended(End.COMMITTED)
    machine.note(0.0, core.Unseen("a shard is missing"))
    machine.note(1.0, ended)
    late = Failure(failed="late")
    for seen in (
        core.GivenUp(late),
        core.Unseen("a shard is missing"),
        core.Trouble("hangs", may_pass=False),
    ):
        machine.note(30.0, seen)
        assert machine.end == ended
    trainers = core.Trainers(gone=frozenset({4}))
    assert machine.next(TIMEOUT_S + 1, trainers) == core.Conclude(End.COMMITTED, None)


def test_shards_that_stay_invisible_for_20_s_fail_the_save() -> None:
    machine = recorded(*range(4))
    for at, fails in ((1.0, False), (20.9, False), (21.1, True)):
        machine.note(at, listed(*range(4)))
        machine.note(at, core.Unseen("a shard is missing"))
        action = machine.next(at + 1.0, NOBODY)
        assert (action == core.Fail(Failure(failed="a shard is missing"), frozenset())) is fails


def test_a_listed_record_counts_until_a_read_does_not_find_it() -> None:
    """A later listing may lack the record of another node."""
    machine = recorded(0, 1)
    machine.note(1.0, listed(2))
    machine.note(2.0, listed(0, 1, 3))
    assert machine.next(9.0, NOBODY) == core.Commit(frozenset(listed(*range(4)).records))
    machine.note(9.0, core.Missing("record of 2"))
    assert machine.next(19.0, NOBODY) == core.Look(records=True)


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [((0, 2), "the commit records of 2 of 4 ranks (1, 3)"), ((1,), "its end, from the node of")],
    ids=["with rank 0", "without rank 0"],
)
def test_a_save_that_times_out_names_what_is_missing(ranks: tuple[int, ...], missing: str) -> None:
    machine = recorded(*ranks)
    machine.note(1.0, listed(0, 2))
    assert not isinstance(machine.next(TIMEOUT_S, NOBODY), core.Fail)
    action = machine.next(TIMEOUT_S + 1, NOBODY)
    assert isinstance(action, core.Fail)
    for words in ("here: gave up after 3600 s", missing, "agent.commit_timeout_s"):
        assert words in action.failure.failed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("others", "has_record", "hangs", "is_final"),
    [
        (True, True, False, True),
        (True, True, True, False),
        (True, False, False, False),
        (False, True, False, False),
    ],
    ids=["others are missing", "storage fails", "own record is missing", "all are here"],
)
def test_a_save_that_times_out_is_written_again_unless_only_other_nodes_lack_it(
    rank: int, *, others: bool, has_record: bool, hangs: bool, is_final: bool
) -> None:
    machine = (recorded if has_record else node_with)(rank, world_size=4 if others else 1)
    if hangs:
        machine.note(TIMEOUT_S, core.Trouble("no answer", may_pass=True))
    action = machine.next(TIMEOUT_S + 1, NOBODY)
    assert isinstance(action, core.Conclude if hangs else core.Fail)
    assert action.failure is not None
    assert action.failure.is_final is is_final


@pytest.mark.parametrize(
    ("connected", "gone", "fails"),
    [((), (1,), True), ((0,), (1,), False), ((), (0,), False), ((), (2,), False)],
    ids=["all ended", "one may come back", "its part is there", "not of this job"],
)
def test_a_save_fails_once_nobody_can_stage_the_missing_part(
    connected: tuple[int, ...], gone: tuple[int, ...], *, fails: bool
) -> None:
    machine = node_with(0, world_size=2)
    trainers = core.Trainers(frozenset(connected), frozenset(gone))
    assert isinstance(machine.next(0.0, trainers), core.Fail) is fails


@pytest.mark.parametrize("is_proposed", [False, True])
def test_a_full_disk_costs_no_shard_whose_record_may_exist(*, is_proposed: bool) -> None:
    machine = node_with(0, 1, durable=(0, 1) if is_proposed else (0,))
    if is_proposed:
        assert machine.next(0.0, NOBODY) == core.WriteRecords((record(0), record(1)))
        machine.note(0.0, core.Trouble("no answer", may_pass=False))
    machine.note(0.0, core.GivenUp(Failure(failed="no space")))
    action = machine.next(1.0, NOBODY)
    assert isinstance(action, core.Fail)
    assert action.discarded == (frozenset() if is_proposed else {0})


def test_a_known_end_stays_as_it_was_created() -> None:
    """A rank that comes late looks for the end, too. It knows less of it than the commit did."""
    cost: Any = object()
    machine = recorded(0, 1)
    machine.note(1.0, core.Ended(End.COMMITTED, is_durable=True, cost=cost))
    machine.note(2.0, core.Ended(End.COMMITTED))
    assert machine.cost is cost
    assert machine.next(2.0, NOBODY) == core.Conclude(End.COMMITTED, None)
