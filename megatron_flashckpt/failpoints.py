"""Named points at which a process can be made to end itself: what a crash there leaves is tested.

    FLASHCKPT_FAULT=WHO:POINT:COUNT[:SIGNAL[:FILE]]

WHO      `agent`, or `rank<N>`: the trainer of global rank N
POINT    one of `POINTS`, below
COUNT    the how-manieth time that this process reaches it; counted from 1
SIGNAL   `KILL` (default), or `STOP`: to be looked at, killed or woken by whoever watches
FILE     made at that moment; while it exists nothing happens, also not in the processes that
         replace this one and inherit its environment

Without that variable `reach` is a function that does nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from megatron_flashckpt.errors import ConfigError

VARIABLE = "FLASHCKPT_FAULT"

#: Every point: the module that reaches it, and what has happened (and what has not) by then.
POINTS = {
    # Trainers, saving. Those of `stage` but its half are reached in the copy thread.
    "save.granted": ("save.slot_acquisition", "the agent gave a slot, which is EMPTY"),
    "save.staging": (
        "save.slot_acquisition",
        "the slot is STAGING and says what it will hold; no bytes",
    ),
    "stage.half": ("save.stager", "what the next forward may change is copied, the rest is not"),
    "stage.copied": ("save.hand_over", "all bytes are copied; the slot is still STAGING"),
    "stage.staged": ("save.hand_over", "the slot is STAGED; the doorbell was not rung"),
    "stage.rung": ("save.hand_over", "the agent has answered the doorbell"),
    "save.told": ("save.outcomes", "the agent told an outcome: the slot is DURABLE or FAILED"),
    # Trainers, loading. Nothing of the model is overwritten before `load.planned`.
    "load.taken": (
        "load.memory_checkpoints",
        "the agent gave back the slab of this rank's former life, if any",
    ),
    "load.planned": ("load.loader", "all is checked and nothing of the tensors read"),
    "load.half": ("load.rank_exchange", "this rank's tensors hold what its own slot has of them"),
    "load.filled": ("load.loader", "this rank's tensors are filled"),
    "load.unadopted": (
        "load.resume",
        "the model goes on from the checkpoint; the agent was not told",
    ),
    "load.adopted": ("load.resume", "the agent knows where training goes on from"),
    # The agent, talking.
    "agent.attached": (
        "agent.request_handler",
        "a trainer's slab is the agent's too; not answered yet",
    ),
    "agent.granted": ("agent.request_handler", "a slot is emptied for a trainer; not answered yet"),
    "agent.enqueued": ("agent.persister", "a staged slot waits to be persisted; not answered yet"),
    # The agent, persisting one shard.
    "persist.created": (
        "agent.shard_writer",
        "the shard file has its name and its space; no bytes",
    ),
    "persist.chunk": ("agent.shard_writer", "one more chunk is written"),
    "persist.chunks": ("agent.shard_writer", "all chunks are written; the header is not"),
    "persist.header": (
        "agent.shard_writer",
        "the header is written; nothing is durable for certain",
    ),
    "file.synced": ("storage.posix", "the shard file's bytes are durable; its name may not be"),
    "persist.durable": ("agent.shard_writer", "the shard is durable; there is no commit record"),
    "persist.record": ("agent.publication", "the commit record of a node is there"),
    # The agent, putting a small file: a commit record, a note, common state, manifest, tracker.
    "put.written": ("storage.posix", "the temporary file is written; the name is not there"),
    "put.renamed": ("storage.posix", "the file has its name, which may not be durable"),
    # The agent, committing.
    "commit.ready": ("agent.commit", "every record is there; nothing is merged"),
    "commit.common": ("agent.commit", "the common state is there; there is no manifest"),
    "commit.manifest": ("agent.commit", "the manifest is durable; the tracker is where it was"),
    "commit.tracker": ("agent.commit", "the tracker names this checkpoint; nothing is tidied up"),
    "save.failed": ("agent.commit_thread", "a save failed for good; its files are there"),
    "forget.file": ("agent.failed_save", "one more file of a failed save is removed"),
    "save.marked": ("agent.commit_thread", "the slots are DURABLE or FAILED; no trainer was told"),
    # The agent, tidying up after a commit. Its trainers may have been told.
    "leftover.file": ("agent.cleanup", "one more file that is of no checkpoint is removed"),
    "commit.tidy": ("agent.tidying", "only the checkpoint is left in its directory"),
    "retain.chosen": ("catalog.retention", "an older checkpoint is to be deleted; it is whole"),
    "retain.hidden": (
        "catalog.retention",
        "its manifest is beside the tracker; its files are there",
    ),
    "retain.file": ("catalog.retention", "one more of its files is deleted"),
    "retain.deleted": ("catalog.retention", "its directory is gone; the moved manifest is not"),
    "commit.done": ("agent.tidying", "all is as it should be in storage"),
    # Agents with `redundancy`: of the node that sends a checkpoint, and of the one that holds it.
    "send.labelled": ("agent.peers.redundancy", "its digests are known; no holder knows of it"),
    "send.begun": ("agent.peers.sender", "a holder has made room for its part; no bytes were sent"),
    "send.chunk": ("agent.peers.sender", "one more chunk is about to be sent"),
    "send.ended": ("agent.peers.sender", "a holder said that it has all; nobody here knows"),
    "hold.begun": ("agent.peers.redundancy", "there is room for a part; not answered yet"),
    "hold.chunk": ("agent.peers.redundancy", "one more chunk is held; not answered yet"),
    "hold.ended": ("agent.peers.redundancy", "a part is held as a whole; not answered yet"),
    "hold.read": ("agent.peers.redundancy", "a chunk of what is held is read for a replacement"),
    # The replacement of a node that was lost.
    "recover.asked": ("agent.peers.redundancy", "all nodes have said what they have of a rank"),
    "recover.filled": ("agent.peers.recovery", "a checkpoint is here again; its slot is EMPTY"),
    "recover.installed": ("agent.peers.redundancy", "the slots are the rank's; it was not told"),
}
_SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}


class _Fault:
    """What is to happen, once, in this process."""

    def __init__(self, text: str) -> None:
        who, point, count, name, self._file, *_ = [*text.split(":", 4), "", "", "", "", ""]
        self.who, self._point = who, point
        if (
            point not in POINTS
            or not count.isdecimal()
            or int(count) < 1
            or (name or "KILL") not in _SIGNALS
        ):
            raise ConfigError(
                f"{VARIABLE}={text}: is not WHO:POINT:COUNT[:SIGNAL[:FILE]], with a signal of "
                f"{', '.join(_SIGNALS)} and a point of {', '.join(POINTS)}; unset it to train"
            )
        self._left = int(count)
        self._signal = _SIGNALS[name or "KILL"]
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        """End (or stop) this process if that is what was asked for."""
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
        # To this very thread: sent to the process, another one might take it, and this one go on.
        signal.pthread_kill(threading.get_ident(), self._signal)


def _pass(point: str) -> None:
    """No fault is set."""


#: Who this process is, for `WHO`.
_name = f"rank{os.environ['RANK']}" if "RANK" in os.environ else ""

#: Say that this process has come to a point.
reach: Callable[[str], None] = (
    _Fault(os.environ[VARIABLE]).reach if os.environ.get(VARIABLE) else _pass
)


def this_is(name: str) -> None:
    """Say who this process is, where RANK does not."""
    global _name
    _name = name
