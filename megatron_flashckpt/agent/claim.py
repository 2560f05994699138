"""The claim of a run to its save directory: one small file that names the writer.

A start puts the claim with a higher epoch than the former one. From then on the agent of rank 0
renews the claim in place. Renewals never create or replace the file. So an agent that hung during a
renewal cannot restore its claim after another run has taken over.

Clocks of hosts are never compared: a writer is alive if its claim changes during an observation.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_flashckpt.agent.incarnations import RankProcess
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format.file_names import CLAIM
from megatron_flashckpt.storage.base import Storage, read_whole

#: Seconds between two renewals.
INTERVAL_S = 2.0
#: A writer that misses this many renewals is gone.
_PATIENCE = 6

#: Claims with a longer interval are rejected as foreign.
_LONGEST_S = 3600.0

#: States of a writer. TRAINING: trainers of its run are connected. FINISHING: no trainers, but a
#: save is still being written. IDLE: its memory is only kept for a restart. ENDED: it has ended.
TRAINING, FINISHING, IDLE, ENDED = range(4)
#: Text that follows the writer in a message, by state.
DOING = (
    ", which is training or was killed",
    ", which is writing staged saves",
    ", which has no trainers",
    ", which has ended",
)

#: Length of every claim, so that a renewal overwrites all bytes of the former claim.
_NBYTES = 1024


class RunKey(NamedTuple):
    """Identity of a run in claims. Two runs differ if epoch or id differ."""

    epoch: int
    run_id: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Writer of a save directory."""

    state: int
    renewed_at: float
    """Seconds since 1970 on the writer's host: shown to people; different in each renewal."""
    claimed_at: float
    interval_s: float
    pid: int
    """Process id of the agent of rank 0."""
    started: int
    """Start time of that process; see `RankProcess`."""
    machine: str
    """Boot and pid namespace in which `pid` is valid; see `this_host`."""
    epoch: int
    host: str
    run_id: str

    @property
    def key(self) -> RunKey:
        return RunKey(self.epoch, self.run_id)

    @property
    def patience_s(self) -> float:
        """Seconds without a renewal after which the writer is gone."""
        return _PATIENCE * self.interval_s

    @property
    def is_of_dead_process(self) -> bool:
        """Return whether the agent ran on this machine and has ended."""
        return self.machine == this_host() and not RankProcess(self.started, self.pid).is_alive

    @property
    def writer(self) -> str:
        """Return the run, the agent, the host and the time of the last renewal, for messages."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.renewed_at))
        return f"run {self.run_id} (agent {self.pid} on {self.host}, claim renewed {when})"


@functools.cache
def this_host() -> str:
    """Return the boot id and the pid namespace, within which process ids are valid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def encode(claim: Claim) -> bytes:
    """Return the contents of the file."""
    return msgspec.msgpack.encode(claim).ljust(_NBYTES, b"\0")


_CLAIM = msgspec.msgpack.Decoder(Claim)


def decode(encoded: bytes, place: str) -> Claim:
    """Return the claim in the contents of the file `place`.

    Raises:
        CorruptCheckpointError: the contents are not a claim.
    """
    try:
        # The last field is text, so the claim does not end with a zero byte.
        claim = _CLAIM.decode(encoded.rstrip(b"\0"))
        if not (claim.host + claim.run_id).isprintable():
            raise ValueError("host or run has unprintable characters")
        if not TRAINING <= claim.state <= ENDED:
            raise ValueError(f"state {claim.state}")
        if not 0 < claim.interval_s < _LONGEST_S:
            raise ValueError(f"a renewal every {claim.interval_s} s")
        time.localtime(claim.renewed_at)
        return claim
    except (msgspec.DecodeError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{place}: is not a claim of a writer ({error}); remove it if no job saves here"
        ) from error


def read(storage: Storage) -> Claim | None:
    """Return the claim to a save directory; None if there is none.

    Raises:
        CorruptCheckpointError: the file is not a claim.
    """
    # `present` opens the directory first, so that NFS asks its server for the current file.
    if CLAIM not in storage.present("", [CLAIM]):
        return None
    try:
        return decode(read_whole(storage, CLAIM, _NBYTES), f"{storage.place}/{CLAIM}")
    except FileNotFoundError:
        return None


def put(storage: Storage, claim: Claim, guard: Callable[[], None] | None = None) -> None:
    """Replace the claim to a save directory, of any writer; see `Storage.put` for `guard`."""
    storage.put(CLAIM, encode(claim), guard=guard)


def renew(storage: Storage, former: Claim, claim: Claim) -> bool:
    """Replace `former` by `claim`; return False if the directory has another claim, or none."""
    return storage.rewrite(CLAIM, encode(former), encode(claim))
