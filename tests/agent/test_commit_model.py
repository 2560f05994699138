"""The commit core against a model store: any interleaving of nodes, faults, deaths and late calls.

Three nodes hold the parts of one save. The store is a dictionary that shows names of other nodes
late, loses answers, and raises; agents hang between any two calls, are killed, and are replaced by
agents that find the shards. `FLASHCKPT_EXAMPLES` sets the number of schedules.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.agent.commit_core import CommitCore
from megatron_flashckpt.file_format.end import End, Failure
from megatron_flashckpt.storage.memory_store import MemoryStore

EXAMPLES = int(os.environ.get("FLASHCKPT_EXAMPLES", "400"))
NODES = ((0, 1), (2,), (3,))
WORLD = 4
TIMEOUT_S = 100.0
#: Seconds after which a late name is visible on all nodes.
LATE_S = 30.0
NODE = st.sampled_from(range(len(NODES)))

_Steps = Generator[None, None, core.Observation]


class Node:
    """One agent: its core, and the action that it carries out."""

    def __init__(self, number: int, now: float, *, is_adopter: bool = False) -> None:
        self.number = number
        self.core = CommitCore("place", WORLD, now, TIMEOUT_S, MemoryStore.pace)
        self.doing: _Steps | None = None
        self.action: core.Action | None = None
        self.result: core.Conclude | None = None
        for rank in NODES[number]:
            self.core.note(now, core.Joined(rank, is_adopter))


class Saves(RuleBasedStateMachine):
    """One save of three nodes; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        #: Value, time and node of the creation, by name: "end", ("shard", r), ("records", ranks).
        self.names: dict[object, tuple[object, float, int]] = {}
        self.nodes = [Node(number, 0.0) for number in range(len(NODES))]
        self.late_calls: list[_Steps] = []
        self.is_late = False
        #: Shards that the machine has removed, and why that was right.
        self.first_end: core.Observation | None = None
        self.was_removed = False
        #: Ranks that have lost their part for good.
        self.lost: set[int] = set()

    @initialize(late=st.booleans())
    def begin(self, late: bool) -> None:
        self.is_late = late

    # ------------------------------------------------------------------ the store

    def create(self, name: object, value: object, node: int) -> object:
        found = self.names.setdefault(name, (value, self.now, node))[0]
        if name == "end" and self.first_end is None:
            self.first_end = self.read_end(own=False)
        return found

    def sees(self, name: object, node: int) -> bool:
        if name not in self.names:
            return False
        _, created, by = self.names[name]
        return not self.is_late or by == node or self.now - created >= LATE_S

    def recorded(self, node: int) -> frozenset[int]:
        ranks: set[int] = set()
        for name in self.names:
            if isinstance(name, tuple) and name[0] == "records" and self.sees(name, node):
                ranks |= name[1]
        return frozenset(ranks)

    def remove_shards(self, ranks: frozenset[int] | set[int]) -> None:
        for rank in ranks:
            if self.names.pop(("shard", rank), None) is None:
                continue
            is_failed = "end" in self.names and self.names["end"][0] is not End.COMMITTED
            may_count = any(
                isinstance(name, tuple) and name[0] == "records" and rank in name[1]
                for name in self.names
            )
            assert is_failed or self.was_removed or not may_count, "removed before the end is known"

    # ------------------------------------------------------------------ actions, call by call

    def carry_out(self, node: Node, action: core.Action) -> _Steps:
        number = node.number
        match action:
            case core.WriteRecords(ranks):
                self.create(("records", ranks), True, number)
                yield
                return core.Recorded(ranks)
            case core.Look(records):
                yield
                if self.sees("end", number):
                    return self.read_end(own=False)
                return core.Looked(self.recorded(number) if records else frozenset())
            case core.Commit():
                if len(self.recorded(number)) < WORLD:
                    yield
                    return core.Unseen("records")
                yield
                if not all(self.sees(("shard", rank), number) for rank in range(WORLD)):
                    return core.Unseen("shards")
                yield
                found = self.create("end", End.COMMITTED, number)
                yield
                return self.read_end(own=found is End.COMMITTED)
            case core.Fail(failure, discarded):
                self.remove_shards(discarded)
                yield
                found = self.create("end", failure, number)
                yield
                return self.read_end(own=found is failure)
            case core.MakeDurable():
                yield
                return core.MadeDurable()
        raise AssertionError(action)

    def read_end(self, *, own: bool) -> core.Observation:
        if "end" not in self.names:
            return core.Looked()
        value = self.names["end"][0]
        if value is End.COMMITTED:
            return core.Ended(End.COMMITTED, None, own)
        assert isinstance(value, Failure)
        return core.Ended(End.FAILED, value, own)

    def finish_call(self, node: Node, trouble: core.Trouble | None = None) -> None:
        """Let one call of the node's action take effect; perhaps its answer is lost."""
        assert node.doing is not None
        try:
            next(node.doing)
        except StopIteration as stop:
            seen: core.Observation = stop.value
            node.doing = None
            node.core.note(self.now, trouble or seen)
        else:
            if trouble is not None:
                node.doing = None
                node.core.note(self.now, trouble)

    def advance(self, node: Node) -> None:
        if node.result is not None:
            return
        if node.doing is not None:
            self.finish_call(node)
            return
        action = node.core.next(self.now)
        if isinstance(action, core.Conclude):
            self.conclude(node, action)
        elif not isinstance(action, core.Wait):
            node.action, node.doing = action, self.carry_out(node, action)
            self.finish_call(node)

    def conclude(self, node: Node, result: core.Conclude) -> None:
        node.result = result
        if result.end is None:
            assert result.failure is not None, "no result without a reason"
            return
        if not self.was_removed:
            assert self.first_end is not None, "an end that nobody has created"
            assert self.first_end.end is result.end, "nodes hear different ends"
        if result.end is End.COMMITTED:
            assert result.failure is None
        else:
            assert result.failure is not None
            self.remove_shards(set(NODES[node.number]))

    # ------------------------------------------------------------------ rules

    @rule(seconds=st.sampled_from((0.02, 0.5, 3.0, 12.0, 31.0)))
    def tick(self, seconds: float) -> None:
        self.now += seconds

    @rule(node=NODE, rank=st.integers(0, 1))
    def write_shard(self, node: int, rank: int) -> None:
        self.end_shard(self.nodes[node], NODES[node][rank % len(NODES[node])])

    def end_shard(self, agent: Node, rank: int) -> None:
        if rank in agent.core.durable or agent.core.is_over or rank in self.lost:
            return
        self.names[("shard", rank)] = (True, self.now, agent.number)
        agent.core.note(self.now, core.Durable(rank))

    @rule(node=NODE, rank=st.integers(0, 1))
    def lose_part(self, node: int, rank: int) -> None:
        agent, rank = self.nodes[node], NODES[node][rank % len(NODES[node])]
        if rank not in agent.core.durable:
            self.lost.add(rank)
            agent.core.note(self.now, core.GivenUp(Failure(failed="no space")))

    @rule(node=NODE)
    def give_up(self, node: int) -> None:
        failure = Failure(failed="training went on", is_final=True)
        self.nodes[node].core.note(self.now, core.GivenUp(failure))

    @rule(node=NODE, calls=st.integers(1, 6))
    def go_on(self, node: int, calls: int) -> None:
        for _ in range(calls):
            self.advance(self.nodes[node])

    @rule(node=NODE, passes=st.booleans(), takes_effect=st.booleans())
    def raise_error(self, node: int, passes: bool, takes_effect: bool) -> None:
        agent = self.nodes[node]
        if agent.doing is None:
            return
        trouble = core.Trouble("an error", passes, lasts=not passes)
        if takes_effect:
            self.finish_call(agent, trouble)
        else:
            agent.doing = None
            agent.core.note(self.now, trouble)

    @rule(node=NODE)
    def replace_agent(self, node: int) -> None:
        """Kill an agent; another one takes the slots that memory still holds.

        The call that the killed agent was in may take effect much later.
        """
        former = self.nodes[node]
        if former.result is not None:
            return
        if former.doing is not None:
            self.late_calls.append(former.doing)
        agent = self.nodes[node] = Node(node, self.now, is_adopter=True)
        listed = self.recorded(node)
        for rank in NODES[node]:
            if self.sees("end", node) or rank in listed:
                agent.core.note(self.now, core.Durable(rank, is_recorded=True))

    @precondition(lambda self: self.late_calls)
    @rule()
    def late_call_takes_effect(self) -> None:
        with contextlib.suppress(StopIteration):
            next(self.late_calls.pop(0))

    @rule(node=NODE)
    def later_commit_closes(self, node: int) -> None:
        """The janitor, after a later commit, closes a save that is not pending with its agent."""
        if self.nodes[node].result is not None:
            self.create("end", Failure(failed="closed by a later commit"), node)

    @precondition(lambda self: self.now > TIMEOUT_S + LATE_S)
    @rule()
    def janitor_removes(self) -> None:
        """What failed goes, the end last, after the deadline of all waiting nodes."""
        value = self.names.get("end", (None,))[0]
        is_waiting = any(agent.result is None for agent in self.nodes)
        if isinstance(value, Failure) and not is_waiting:
            self.was_removed = True
            self.names.clear()

    # ------------------------------------------------------------------ invariants

    @invariant()
    def a_save_has_one_end(self) -> None:
        value = self.names.get("end", (None,))[0]
        if value is None or self.was_removed:
            return
        kind = End.COMMITTED if value is End.COMMITTED else End.FAILED
        assert self.first_end is not None
        assert self.first_end.end is kind, "an end was replaced"

    @invariant()
    def a_checkpoint_is_whole(self) -> None:
        if self.was_removed:  # a zombie's commit: loads count only what is whole
            return
        if self.names.get("end", (None,))[0] is End.COMMITTED:
            missing = [rank for rank in range(WORLD) if ("shard", rank) not in self.names]
            assert not missing, f"a checkpoint without the shards of {missing}"

    def teardown(self) -> None:
        """Nobody waits for ever: with a storage that answers, all agents come to a result."""
        for _ in range(400):
            for agent in self.nodes:
                for rank in NODES[agent.number]:
                    self.end_shard(agent, rank)
                self.advance(agent)
                self.a_save_has_one_end()
                self.a_checkpoint_is_whole()
            self.now += 1.0
        assert all(agent.result is not None for agent in self.nodes), "a node waits for ever"


def check(examples: int = EXAMPLES, *, shrinks: bool = True) -> None:
    run_state_machine_as_test(
        Saves,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
            derandomize=examples == EXAMPLES,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_interleaving_breaks_a_promise() -> None:
    check()


def _frees_before_the_end(self: CommitCore, now: float) -> core.Action:
    action = _next(self, now)
    if isinstance(action, core.Fail):
        return core.Fail(action.failure, frozenset(self.ranks))
    return action


def _believes_itself(self: CommitCore, now: float, seen: core.Observation) -> None:
    if isinstance(seen, core.Ended) and self._failure is not None:
        seen = core.Ended(End.FAILED, self._failure, True)
    _note(self, now, seen)


def _waits_for_ever(self: CommitCore, now: float) -> core.Action:
    self.timeout_s = 1e9
    return _next(self, now)


def _forgets_what_it_proposed(self: CommitCore, now: float) -> core.Action:
    action = _next(self, now)
    self._proposed &= self._recorded
    return action


_next, _note = CommitCore.next, CommitCore.note


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("next", _frees_before_the_end),
        ("next", _waits_for_ever),
        ("next", _forgets_what_it_proposed),
        ("note", _believes_itself),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_each_rule_is_needed(monkeypatch: pytest.MonkeyPatch, name: str, without: object) -> None:
    monkeypatch.setattr(CommitCore, name, without)
    with pytest.raises(AssertionError):
        check(2000, shrinks=False)
