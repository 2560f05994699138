"""Failpoints: named points at which a process can kill itself, so that tests cover crashes there.

    FLASHCKPT_FAULT=WHO:POINT:COUNT[:SIGNAL[:FILE]]

WHO      `agent`, or `rank<N>`: the trainer of global rank N
POINT    one of `POINTS`, below
COUNT    trigger on the COUNT-th hit of the point in this process (1 = first)
SIGNAL   `KILL` (default), or `STOP`, after which a test inspects, kills or continues the process
FILE     created when the fault triggers; while the file exists, no fault triggers, also in
         processes that replace this one and inherit its environment

Without the variable `hit` does nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from megatron_flashckpt.errors import ConfigError

VARIABLE = "FLASHCKPT_FAULT"

#: All points: the module that hits the point, and the state at that moment.
POINTS = {
    # Trainers, saving. The copy thread hits the `stage` points, except `stage.half`.
    "save.granted": ("save.slot_acquisition", "the agent granted a slot, which is EMPTY"),
    "save.staging": (
        "save.slot_acquisition",
        "the slot is STAGING and has its descriptor, but no data",
    ),
    "stage.half": ("save.stager", "state that the next forward may change is copied, no other"),
    "stage.copied": ("save.hand_over", "all bytes are copied; the slot is still STAGING"),
    "stage.staged": ("save.hand_over", "the slot is STAGED; the agent was not notified"),
    "stage.rung": ("save.hand_over", "the agent has answered the notification"),
    "save.told": (
        "save.pending_saves",
        "the agent reported the result: the slot is DURABLE or FAILED",
    ),
    # Trainers, loading. The model is not changed before `load.planned`.
    "load.taken": (
        "load.memory_checkpoints",
        "the agent returned the slab of this rank before the restart, if any",
    ),
    "load.planned": ("load.loader", "everything is checked; no tensor is read"),
    "load.half": ("load.rank_exchange", "this rank's tensors are filled from its node's slots"),
    "load.filled": ("load.loader", "this rank's tensors are filled"),
    "load.unadopted": (
        "load.resume",
        "the model has the checkpoint's state; the agent does not know",
    ),
    "run.announced": ("agent.runs", "the sign of life is there, the object of the run is not"),
    "run.created": ("agent.runs", "the object of the run is there; no agent knows the run"),
    "load.adopted": ("load.resume", "the agent knows the checkpoint that training resumes from"),
    # The agent, answering trainers.
    "agent.attached": (
        "agent.request_handler",
        "the agent has mapped a trainer's slab; not answered yet",
    ),
    "agent.granted": ("agent.request_handler", "a slot is emptied for a trainer; not answered yet"),
    "agent.enqueued": ("agent.saves", "a staged slot is queued for writing; not answered yet"),
    # The agent, persisting one shard.
    "persist.created": (
        "agent.shard_writer",
        "the shard file has its space under a temporary name, but no data",
    ),
    "persist.chunk": ("agent.shard_writer", "one more chunk is written"),
    "persist.chunks": ("agent.shard_writer", "all chunks are written; the header is not"),
    "persist.header": (
        "agent.shard_writer",
        "the header is written, but may not be durable",
    ),
    "file.synced": (
        "storage.posix_writer",
        "the shard file's data is durable under a temporary name; nobody sees it",
    ),
    "persist.durable": ("agent.shard_writer", "the shard is durable; there is no commit record"),
    "persist.record": ("agent.proposals", "the commit record of a node exists"),
    # Any process, creating or putting a small file: a run, a sign of life, a commit record, an end,
    # common state, a tracker.
    "put.written": ("storage.posix_files", "the data is written under a temporary name only"),
    "put.renamed": ("storage.posix_files", "the file has its name, which may not be durable"),
    # The same in a bucket: one shard, and any small object.
    "upload.begun": ("storage.object_writer", "the upload has a number; no part was sent"),
    "upload.chunk": (
        "storage.object_writer",
        "the client has one more chunk of a shard, and sends whole parts",
    ),
    "upload.whole": ("storage.object_writer", "the client has all chunks; nobody sees the shard"),
    "object.put": ("storage.object_store", "the object is there; its writer does not know"),
    # The agent, committing.
    "commit.ready": ("agent.committer", "all commit records exist; none is merged"),
    "commit.common": ("agent.proposals", "the common state exists; the save has no end"),
    "commit.end": ("agent.proposals", "the save has an end; the tracker has not moved"),
    "commit.tracker": ("agent.track", "the tracker names this checkpoint; its twin does not"),
    "commit.tracked": ("agent.track", "the twin does, too; no file is tidied up"),
    "save.failed": ("agent.committer", "a save has failed for good; its files exist"),
    "forget.file": ("agent.janitor", "a node has removed its files of a failed save"),
    "save.marked": ("agent.committer", "the slots are DURABLE or FAILED; trainers do not know"),
    # The janitor, after a commit. Trainers may know the result.
    "commit.records": ("agent.janitor", "the commit records of a checkpoint are deleted"),
    "leftover.ended": ("agent.janitor", "a save of a dead run has a failed end; its files exist"),
    "leftover.deleted": ("agent.janitor", "the files of a failed save are deleted; its end is not"),
    "commit.tidy": ("agent.janitor", "unfinished saves that the commit has passed are removed"),
    "retain.chosen": ("agent.janitor", "an older checkpoint is selected; it is complete"),
    "retain.hidden": ("agent.janitor", "its end is deleted; its files exist"),
    "retain.failed": ("agent.janitor", "its end says failed; its files exist"),
    "commit.done": ("agent.janitor", "the commit is complete, and storage is tidied up"),
    # Agents with `redundancy`: of the node that sends a checkpoint, and of the one that holds it.
    "send.labelled": ("agent.peers.redundancy", "its digests are known; no holder knows of it"),
    "send.begun": ("agent.peers.link", "a holder has allocated its part; no data was sent"),
    "send.chunk": ("agent.peers.link", "one more chunk is about to be sent"),
    "send.ended": ("agent.peers.link", "a holder reported its part complete; not recorded yet"),
    "hold.begun": ("agent.peers.redundancy", "a part is allocated; not answered yet"),
    "hold.chunk": ("agent.peers.redundancy", "one more chunk is held; not answered yet"),
    "hold.ended": ("agent.peers.redundancy", "a part is held completely; not answered yet"),
    "hold.read": ("agent.peers.redundancy", "a held chunk is read for a replacement"),
    # The replacement of memory that was lost.
    "recover.asked": ("agent.peers.redundancy", "all nodes have listed their parts of a rank"),
    "recover.filled": ("agent.recovery", "a checkpoint is restored; its slot is EMPTY"),
    "recover.installed": ("agent.recovery", "the slots belong to the rank, which does not know"),
}
_SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}


class _Fault:
    """A fault that triggers once in this process."""

    def __init__(self, text: str) -> None:
        target, point, count, name, self._file, *_ = [*text.split(":", 4), "", "", "", "", ""]
        self.who, self._point = target, point
        if (
            point not in POINTS
            or not count.isdecimal()
            or int(count) < 1
            or (name or "KILL") not in _SIGNALS
        ):
            raise ConfigError(
                f"{VARIABLE}={text}: must be WHO:POINT:COUNT[:SIGNAL[:FILE]], with one of the "
                f"signals {', '.join(_SIGNALS)} and of the points {', '.join(POINTS)}; unset the "
                "variable to train"
            )
        self._left = int(count)
        self._signal = _SIGNALS[name or "KILL"]
        self._lock = threading.Lock()

    def hit(self, point: str) -> None:
        """Kill (or stop) this process if the fault triggers here."""
        if point != self._point or _name != self.who:
            return
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self._file:
            try:
                os.close(os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                return
        # Signal this thread: another thread might take a process signal, while this one continues.
        signal.pthread_kill(threading.get_ident(), self._signal)


def _do_nothing(point: str) -> None:
    """Do nothing, because no fault is set."""


#: Name of this process, for `WHO`.
_name = f"rank{os.environ['RANK']}" if "RANK" in os.environ else ""

#: Hit a failpoint.
hit: Callable[[str], None] = (
    _Fault(os.environ[VARIABLE]).hit if os.environ.get(VARIABLE) else _do_nothing
)


def set_process_name(name: str) -> None:
    """Set the name of this process, if the variable RANK does not."""
    global _name
    _name = name
