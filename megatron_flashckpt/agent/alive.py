"""The object that tells whether a run trains; the agent of its rank 0 renews it every 2 s.

A start looks at it and is refused, waits, or takes the place of the run. The object decides nothing
else: what a load counts follows from the lineage, so a damaged or removed one loses no save.

Clocks of hosts are never compared: a run is alive if its object changes during an observation. Only
the newest run can be alive. Later runs need not wait for a run that was overtaken.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.incarnations import RankProcess, process_with
from megatron_flashckpt.catalog.directory import run_numbers
from megatron_flashckpt.errors import (
    UNDECODABLE,
    AgentError,
    CorruptCheckpointError,
    OtherWriterError,
    StorageError,
    is_damage,
)
from megatron_flashckpt.file_format.file_names import ALIVE, alive_file, run_number
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

#: Values of `other_writer`.
Policy = Literal["refuse", "take_over"]
#: `training`: trainers of the run are connected. `finishing`: no trainers, but a save is still
#: being written. A run in another state has no object.
State = Literal["training", "finishing"]

#: Seconds between two renewals.
INTERVAL_S = 2.0
#: A run that nobody renews for so many seconds is gone, whatever its object says.
_PATIENCE_S = 6 * INTERVAL_S
_LOOK_S = 0.1
_NBYTES = 2**16


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """A run that trains, or still writes its saves."""

    run: str
    state: State
    renewed: int
    """Number of renewals by this process."""
    renewed_at: float
    """Seconds since 1970 on the run's host: shown to people."""
    host: str
    pid: int
    """Process id of the agent of rank 0."""
    started: int
    """Start time of that process; see `RankProcess`."""
    machine: str
    """Boot and pid namespace in which process ids are valid; see `this_machine`."""
    trainer: RankProcess | None = None
    """Process of rank 0, which replaces a killed agent; None: unknown, or it has ended."""
    trained: int = 0
    """The last iteration that rank 0 has completed; 0: unknown."""
    step_s: float = 0.0
    """Shortest seconds per iteration of the last renewals; 0: unknown."""
    looks_every_s: float = 0.0
    """Seconds between two looks of a node for a request to save; 0: it does not look."""
    is_saving: bool = False
    """True while the agent of rank 0 has a save to commit."""

    @property
    def is_of_dead_process(self) -> bool:
        """Return whether agent and rank 0 ran on this machine and have ended.

        This process has begun anew if it is that rank 0.
        """
        if self.machine != this_machine() or RankProcess(self.started, self.pid).is_alive:
            return False
        trainer = self.trainer
        return trainer is None or trainer.pid == os.getpid() or not trainer.is_alive

    @property
    def writer(self) -> str:
        """Return the run, the agent, the host and the time of the last renewal, for messages."""
        if not self.host:
            return f"run {self.run} (its sign of life is damaged)"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.renewed_at))
        return f"run {self.run} (agent {self.pid} on {self.host}, last sign of life {when})"

    @property
    def doing(self) -> str:
        """Return what follows the writer in a message."""
        if self.state == "training":
            return "which is training or was killed"
        return "which is writing staged saves"


@functools.cache
def this_machine() -> str:
    """Return the boot id and the pid namespace, within which process ids are valid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def sign_of_life(
    run: str, state: State, agent_pid: int, renewed: int = 0, trainer: RankProcess | None = None
) -> Alive:
    """Return the object of a run whose rank 0 has the agent `agent_pid` on this machine."""
    agent = process_with(agent_pid)
    return Alive(
        run=run,
        state=state,
        renewed=renewed,
        renewed_at=time.time(),
        host=platform.node(),
        pid=agent_pid,
        started=0 if agent is None else agent.started,
        machine=this_machine(),
        trainer=trainer,
    )


def put(store: Store, alive: Alive) -> None:
    """Put the object of a run, or renew it."""
    store.put(alive_file(alive.run), msgspec.json.encode(alive))


_ALIVE = msgspec.json.Decoder(Alive)


def decode(encoded: bytes, place: str) -> Alive:
    """Return the contents of the object `place`.

    Raises:
        CorruptCheckpointError: they are damaged.
    """
    try:
        alive = _ALIVE.decode(encoded)
        if not run_number(alive.run) or not alive.host.isprintable():
            raise ValueError("its run or host is no name")
        time.localtime(alive.renewed_at)
        return alive
    except (ValueError, OverflowError, OSError, *UNDECODABLE) as error:
        raise CorruptCheckpointError(f"{place}: does not tell which run trains ({error})") from (
            error
        )


def read(store: Store, run: str) -> Alive | None:
    """Return the object of a run; None if there is none, or after a warning on a damaged one."""
    alive, error = _shown(store, run)
    if error is None:
        return alive
    logger.warning("%s; it is ignored", error)
    return None


def _shown(store: Store, run: str) -> tuple[Alive | None, Exception | None]:
    """Return the object of a run, or what stands for a damaged one, and the damage."""
    name, encoded = alive_file(run), b""
    try:
        encoded = store.get(name, 0, _NBYTES)
        return decode(encoded, f"{store.place}/{name}"), None
    except FileNotFoundError:
        return None, None
    except (CorruptCheckpointError, StorageError) as error:
        if not is_damage(error):
            raise
        return _unknown(run, encoded), error


def _unknown(run: str, encoded: bytes) -> Alive:
    """Return what stands for a damaged object; other contents are another renewal."""
    return Alive(
        run=run,
        state="training",
        renewed=xxhash.xxh3_64_intdigest(encoded),
        renewed_at=0.0,
        host="",
        pid=0,
        started=0,
        machine="",
    )


def forget(store: Store, run: str) -> None:
    """Delete the object of a run that has ended, or was not opened after all."""
    store.delete([alive_file(run)])


def _names(store: Store) -> list[str]:
    """Return the runs that have an object."""
    return [entry.name for entry in store.list(ALIVE, sizes=False) if run_number(entry.name)]


def newest(store: Store) -> Alive | None:
    """Return the object of the newest run; None if that run neither trains nor writes.

    The run may have been killed: `is_live` observes it.
    """
    for run in _of_newest_run(store):
        if (alive := read(store, run)) is not None:
            return alive
    return None


def _of_newest_run(store: Store) -> list[str]:
    """Return the runs with a sign of life that no later run has overtaken: none if all have ended.

    A run overtakes others once it has its number. Before that, it has a sign of life only: so there
    are two if starts meet, or if one was killed then.
    """
    runs = _names(store)
    newest = max(run_numbers(store), default=0) if runs else 0
    return [run for run in runs if run_number(run) >= newest]


class Observation:
    """Reads an object repeatedly, to see whether it is renewed, by the clock of this host.

    While storage does not answer this host, it may not answer the writer either. So the time of one
    read counts as silence of the writer for one interval of renewals at most.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._last: Alive | None = None
        self._read_at = 0.0
        self._silent_s = 0.0
        self.renews = False

    def look(self) -> Alive | None:
        """Return the present object; None if the run has ended, was killed, or is silent."""
        # Whoever renews an object is alive, so a damaged one is waited for like any other.
        alive, _ = _shown(self._store, self._run)
        now = time.monotonic()
        if alive is None or alive.is_of_dead_process:
            return None
        if alive != self._last:
            self.renews = self._last is not None
            self._last, self._silent_s = alive, 0.0
        else:
            self._silent_s += min(now - self._read_at, INTERVAL_S)
        self._read_at = now
        return alive if self._silent_s <= _PATIENCE_S else None


def is_live(store: Store) -> Alive | None:
    """Return the object of a run that trains or writes now; None if none does.

    Takes as long as a renewal can take, or less if the state is certain earlier.
    """
    for run in _of_newest_run(store):
        observation = Observation(store, run)
        while (alive := observation.look()) is not None:
            if observation.renews:
                return alive
            time.sleep(_LOOK_S)
    return None


class Admission:
    """Lets a start pass other runs that save to its directory, or refuses it. Used by rank 0.

    A run whose trainers are gone does not refuse a start: its agent has a bounded time to write its
    staged saves, from which a restart wants to resume.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        wait_s: float,
        connect: Callable[[], AgentClient] | None,
    ) -> None:
        """Look at nothing yet.

        Args:
            policy: what to do about another run that still trains.
            wait_s: longest wait for such a run to end, or for the agent of an ended run to write
                its staged saves.
            connect: returns the connection to the agent of this node. None: no job starts, so a
                run whose saves are still being written is not overtaken either.
        """
        self.store = store
        self._policy = policy
        self._wait_s = wait_s
        self._connect = connect
        #: Runs that this start has passed.
        self._passed: set[str] = set()

    def await_end(self) -> None:
        """Return when no other run saves to the directory, or when it may be overtaken.

        Nothing is changed. A run that was passed once is not looked at again.

        Raises:
            OtherWriterError: another run trains there, and the policy is `refuse`.
        """
        while others := set(_of_newest_run(self.store)) - self._passed:
            run = max(others)
            self._await(run)
            self._passed.add(run)

    def allow(self, run: str) -> None:
        """Pass a run without a look, because this process has opened it."""
        self._passed.add(run)

    def _await(self, run: str) -> None:
        deadline = time.monotonic() + self._wait_s
        observation = Observation(self.store, run)
        has_waited = False
        while (alive := observation.look()) is not None:
            if alive.state == "training" and self._policy == "take_over":
                logger.warning(
                    "%s: taken over from %s, which is training: its later saves do not count",
                    self.store.place,
                    alive.writer,
                )
                return
            # A restarted job finds its agent on the same node again, and that agent continues.
            if self._is_own_agent(alive):
                return
            if not has_waited:
                has_waited = True
                logger.warning(
                    "%s: %s may still write there; waiting for its end, at most %g s if it turns "
                    "out to be alive",
                    self.store.place,
                    alive.writer,
                    self._wait_s,
                )
            if observation.renews and time.monotonic() > deadline:
                if alive.state == "training" or self._connect is None:
                    raise self._refusal(alive)
                logger.warning(
                    "%s: %s has not written its staged saves within %g s and is overtaken",
                    self.store.place,
                    alive.writer,
                    self._wait_s,
                )
                return
            time.sleep(_LOOK_S)

    def _is_own_agent(self, alive: Alive) -> bool:
        if self._connect is None or alive.machine != this_machine():
            return False
        try:
            return self._connect().agent_pid == alive.pid
        except AgentError:  # a save will report that there is none
            return False

    def _refusal(self, alive: Alive) -> OtherWriterError:
        if alive.state == "finishing":
            return OtherWriterError(
                f"{self.store.place}: the agent of {alive.writer} still writes staged saves there; "
                "nothing was changed. Try again after their commit, or write elsewhere"
            )
        return OtherWriterError(
            f"{self.store.place}: {alive.writer} trains and saves there; nothing was changed. End "
            "that job, or save elsewhere; 'other_writer: take_over' replaces it (its later saves "
            "do not count)"
        )
