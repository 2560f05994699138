"""A start looks whether another run trains: it is refused, waits, or passes. The clock is owned."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent import alive
from megatron_flashckpt.agent.alive import Admission, Alive, State, is_live, sign_of_life
from megatron_flashckpt.agent.incarnations import process_with
from megatron_flashckpt.errors import AgentError, CorruptCheckpointError, OtherWriterError
from megatron_flashckpt.file_format.file_names import alive_file, run_file
from megatron_flashckpt.file_format.run_object import RunObject, encode_run
from tests.support.memory_store import MemoryStore

RUN, LATER = "000004-aaaa", "000005-bbbb"


class Clock:
    """A clock that advances only while somebody sleeps; renewals elsewhere happen on it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, Callable[[], object]]] = []
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        assert self.slept < 3600, "nothing ends this wait"
        self.now += seconds
        for entry in sorted(self._due, key=lambda entry: entry[0]):
            if entry[0] <= self.now:
                self._due.remove(entry)
                entry[1]()

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self._due.append((self.now + seconds, action))

    def every(self, seconds: float, action: Callable[[int], object], number: int = 1) -> None:
        """Call `action` with 1, 2, 3 and so on, for ever."""

        def act() -> None:
            action(number)
            self.every(seconds, action, number + 1)

        self.after(seconds, act)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    import time

    owned = Clock()
    stand_in = SimpleNamespace(
        monotonic=owned.monotonic,
        sleep=owned.sleep,
        time=lambda: owned.now,
        strftime=time.strftime,
        localtime=time.localtime,
    )
    monkeypatch.setattr(alive, "time", stand_in)
    return owned


def no_agent() -> Any:
    raise AgentError("there is no agent")


def elsewhere(run: str = RUN, renewed: int = 0, state: State = "training", **more: Any) -> Alive:
    """Return what the agent of a run on another machine puts."""
    own = sign_of_life(run, state, 77, renewed)
    return msgspec.structs.replace(own, machine="another one", **more)


def renew(clock: Clock, store: MemoryStore, run: str = RUN, state: State = "training") -> None:
    """Have an agent elsewhere renew a run for ever."""
    alive.put(store, elsewhere(run, state=state))
    clock.every(2.0, lambda number: alive.put(store, elsewhere(run, number, state)))


def start(
    store: MemoryStore,
    policy: alive.Policy = "refuse",
    wait_s: float = 0.0,
    connect: Callable[[], Any] = no_agent,
) -> None:
    Admission(store, policy, wait_s, connect).await_end()


def test_a_refused_start_names_the_writer_and_changes_nothing(clock: Clock) -> None:
    store = MemoryStore()
    start(store)
    assert clock.slept == 0, "the directory is empty"
    renew(clock, store)
    with pytest.raises(OtherWriterError) as caught:
        start(store)
    for words in (RUN, f"agent 77 on {os.uname().nodename}", "take_over", "nothing was changed"):
        assert words in str(caught.value)
    assert set(store.objects) == {alive_file(RUN)}
    assert clock.slept < 5.0


def test_a_start_passes_a_run_that_nobody_renews(clock: Clock) -> None:
    """The times in the object have no effect, because clocks of hosts are not compared.

    Neither has the interval of its renewals, which objects told before.
    """
    store = MemoryStore()
    fields = msgspec.to_builtins(elsewhere(renewed_at=clock.now + 3600.0)) | {"interval_s": 3000.0}
    store.put(alive_file(RUN), msgspec.json.encode(fields))
    start(store)
    assert clock.slept == pytest.approx(12.0, abs=0.5)
    assert is_live(store) is None


def test_a_start_does_not_wait_for_an_ended_process_of_this_machine(clock: Clock) -> None:
    store, me = MemoryStore(), process_with(os.getpid())
    assert me is not None
    own = sign_of_life(RUN, "training", me.pid)
    assert not own.is_of_dead_process
    alive.put(store, msgspec.structs.replace(own, started=me.started - 1))
    start(store)
    assert clock.slept == 0


def test_a_run_whose_agent_was_killed_lives_as_long_as_its_rank_0() -> None:
    """The rank replaces its agent at the end of its step, and goes on."""
    agent, rank = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    sign = sign_of_life(RUN, "training", agent.pid, trainer=process_with(rank.pid))
    dead = []
    for process in (agent, rank):
        process.kill()
        process.wait()
        dead.append(sign.is_of_dead_process)
    assert dead == [False, True]


@pytest.mark.parametrize("differs", ["", "the agent", "the machine"])
def test_a_restarted_job_finds_its_agent_on_this_node_and_does_not_wait(
    differs: str, clock: Clock
) -> None:
    store = MemoryStore()
    mine = sign_of_life(RUN, "training", os.getpid())
    if differs == "the machine":
        mine = msgspec.structs.replace(mine, machine="another one")
    alive.put(store, mine)
    clock.every(2.0, lambda number: alive.put(store, msgspec.structs.replace(mine, renewed=number)))
    agent = SimpleNamespace(agent_pid=1 if differs == "the agent" else os.getpid())
    with pytest.raises(OtherWriterError) if differs else contextlib.nullcontext():
        start(store, connect=lambda: agent)
    assert bool(clock.slept) == bool(differs)


@pytest.mark.parametrize(
    ("policy", "state", "wait_s", "slept_s"),
    [
        ("refuse", "training", 60.0, 31.0),  # it ends then
        ("take_over", "training", 60.0, 0.0),
        ("refuse", "finishing", 20.0, 20.0),
        ("take_over", "finishing", 20.0, 20.0),
    ],
)
def test_a_start_waits_for_another_run(
    policy: alive.Policy, state: State, wait_s: float, slept_s: float, clock: Clock
) -> None:
    """For staged saves of another agent a bounded time, whatever the policy."""
    store = MemoryStore()
    renew(clock, store, state=state)
    clock.every(2.0, lambda _: clock.now > 1030.0 and alive.forget(store, RUN))
    start(store, policy, wait_s=wait_s)
    assert clock.slept == pytest.approx(slept_s, rel=0.05)


def test_a_run_that_was_overtaken_holds_nobody_up(clock: Clock) -> None:
    """Its trainers may train on; what they save does not count."""
    store = MemoryStore()
    renew(clock, store)
    store.create(run_file(5), encode_run(RunObject(name=LATER)))
    start(store)
    assert is_live(store) is None
    assert alive.newest(store) is None
    assert clock.slept == 0


def test_a_start_that_was_killed_before_it_took_its_number_hides_no_run(clock: Clock) -> None:
    """Its sign of life came first; the run that it was to replace still trains."""
    store = MemoryStore()
    store.create(run_file(4), encode_run(RunObject(name=RUN)))
    renew(clock, store)
    alive.put(store, elsewhere(LATER))
    live = is_live(store)
    assert live is not None
    assert live.run == RUN
    with pytest.raises(OtherWriterError, match=RUN):
        start(store)


def test_a_run_that_begins_during_the_wait_is_awaited_too(clock: Clock) -> None:
    store = MemoryStore()
    alive.put(store, elsewhere(RUN))
    clock.after(5.0, lambda: renew(clock, store, LATER))
    with pytest.raises(OtherWriterError, match=LATER):
        start(store)


@pytest.mark.parametrize(
    "contents",
    [
        b"garbage",
        msgspec.json.encode(elsewhere(run="no run")),
        msgspec.json.encode(elsewhere(host="\x1b[2J")),
        msgspec.json.encode(elsewhere()).replace(b"training", b"sleeping"),
    ],
)
def test_a_damaged_object_is_that_of_a_run_that_may_be_alive(
    contents: bytes, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writer replaces it, or is silent."""
    store = MemoryStore()
    store.put(alive_file(RUN), contents)
    start(store)
    assert is_live(store) is None
    assert f"run {RUN} (its sign of life is damaged) may still write there" in caplog.text
    clock.after(1.0, lambda: renew(clock, store))
    with pytest.raises(OtherWriterError, match=RUN):
        start(store)
    with pytest.raises(CorruptCheckpointError):
        alive.decode(contents, "place")


def test_a_writer_without_storage_is_not_taken_for_dead(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage was away for both jobs, for longer than a run may be silent."""
    store, reads = MemoryStore(), itertools.count(1)
    alive.put(store, elsewhere())
    get = store.get

    def late(*request: Any) -> bytes:
        held = get(*request)
        if next(reads) == 2:
            clock.now += 13.0
            renew(clock, store)
        return held

    monkeypatch.setattr(store, "get", late)
    with pytest.raises(OtherWriterError):
        start(store)
