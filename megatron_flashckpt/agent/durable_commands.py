"""Runs the user's command `agent.on_durable` after commits, in the agent of rank 0.

At least once per checkpoint: a mark (`<save>.due`) stands next to the shards before the save can be
committed, and is deleted when the command has ended. The next agent that finds a mark runs the
command again. Retention spares a checkpoint with a mark.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO

from megatron_flashckpt.agent.node import Node
from megatron_flashckpt.agent.worker import Worker
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.errors import AlreadyExistsError, FlashCkptError
from megatron_flashckpt.file_format.file_names import due_name, end_name, iteration_dir
from megatron_flashckpt.file_format.manifest import MAX_MANIFEST_NBYTES, decode_facts
from megatron_flashckpt.storage.retrying_store import RetryingStore
from megatron_flashckpt.storage.store import Store, read_whole

logger = logging.getLogger(__name__)

#: Pauses before a failed command is tried again, in seconds.
_RETRIES_S = (10.0, 60.0)
#: Seconds between SIGTERM and SIGKILL for a command that has to end.
_TERM_S = 5.0
#: Lines of a command's output that reach the log.
_MAX_LINES = 1000
#: Checkpoints that may wait before the log warns that the command is too slow.
_MANY = 4


def _mark(save: Save) -> str:
    return f"{iteration_dir(save.iteration)}/{due_name(save.save_id)}"


def announce(store: Store, save: Save) -> None:
    """Note that a command is due for a save, which is not committed yet."""
    with contextlib.suppress(AlreadyExistsError):  # an earlier attempt to commit
        store.create(_mark(save), b"")


def forget_due(store: Store, save: Save) -> None:
    """Note that the command of a save has ended, or is not wanted any more."""
    store.delete([_mark(save)])


class DurableCommands:
    """The commands of this agent's commits, one after the other, in a thread of their own."""

    def __init__(self, node: Node) -> None:
        """Run nothing yet; the settings are those that `node` has when a command begins."""
        self._node = node
        self._worker = Worker("on-durable", "a command was not run")
        self._lock = threading.Lock()
        self._due: set[Save] = set()
        self._closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None

    def add(self, store: Store, save: Save) -> None:
        """Have the command run for a committed save, unless it waits already. Never blocks."""
        with self._lock:
            if save in self._due:
                return
            self._due.add(save)
            waiting = len(self._due)
        if waiting > _MANY:
            logger.warning(
                "%d checkpoints wait for the command 'agent.on_durable', and stay until it has "
                "ended: make the command faster, or save less often",
                waiting,
            )
        self._worker.add(functools.partial(self._run_for, RetryingStore(store), save))

    def is_due(self, save: Save) -> bool:
        """Return whether the command is running or waiting for a save."""
        return save in self._due

    def are_due(self) -> bool:
        """Return whether a command is running or waiting."""
        return bool(self._due)

    def close(self) -> None:
        """End the running command. Its mark stays, and so do those of the commands that wait."""
        with self._lock:
            self._closing.set()
            running = self._process
        if running is not None:
            logger.warning("the command 'agent.on_durable' is ended; the next start repeats it")
            _end(running)
        self._worker.close(_TERM_S)

    def _run_for(self, store: Store, save: Save) -> None:
        try:
            # A listing from before the command's end may have had it taken up again.
            if store.stat(_mark(save)) is not None and self._has_ended(store, save):
                forget_due(store, save)
        except FileNotFoundError:  # removed by hand meanwhile
            logger.info("iteration %d is gone: its command is not run", save.iteration)
        except (FlashCkptError, OSError) as error:
            logger.error("iteration %d: 'agent.on_durable' is not done: %s", save.iteration, error)
        finally:
            with self._lock:
                self._due.discard(save)

    def _has_ended(self, store: Store, save: Save) -> bool:
        """Run the command; return False if the agent ends before it."""
        command = self._node.options.on_durable
        if command is None:  # a later run has turned it off
            return True
        end = f"{iteration_dir(save.iteration)}/{end_name(save.save_id)}"
        facts = decode_facts(read_whole(store, end, MAX_MANIFEST_NBYTES), f"{store.place}/{end}")
        variables = {
            "DURABLE_PATH": f"{store.place}/{iteration_dir(save.iteration)}",
            "DURABLE_ROOT": store.place,
            "DURABLE_ITERATION": str(save.iteration),
            "DURABLE_SAVE": save.save_id,
            "DURABLE_METRICS": json.dumps(facts.metrics),
        }
        for pause_s in (*_RETRIES_S, None):
            logger.info("iteration %d: running 'agent.on_durable'", save.iteration)
            failure = self._run(command, variables)
            if self._closing.is_set():
                return False
            if failure is None:
                logger.info("iteration %d: 'agent.on_durable' has ended well", save.iteration)
                return True
            again = "given up" if pause_s is None else f"tried again in {pause_s:g} s"
            logger.error("iteration %d: 'agent.on_durable' %s; %s", save.iteration, failure, again)
            if pause_s is not None and self._closing.wait(pause_s):
                return False
        return True

    def _run(self, command: str, variables: dict[str, str]) -> str | None:
        """Run the command once; return how it failed, None if it did not."""
        timeout_s = self._node.options.on_durable_timeout_s
        with self._lock:
            if self._closing.is_set():
                return "was not begun"
            self._process = process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="backslashreplace",
                start_new_session=True,
            )
        # The agent is spared when memory runs out; its commands are not.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("0")
        assert process.stdout is not None
        # A child that the command leaves behind may hold its output open for ever.
        reader = threading.Thread(target=_log, args=(process.stdout,), daemon=True)
        reader.start()
        failure = None
        try:
            status = process.wait(timeout_s)
            if status:
                failure = f"has failed (exit status {status})"
        except subprocess.TimeoutExpired:
            failure = f"was ended after {timeout_s:g} s ('agent.on_durable_timeout_s')"
            _end(process)
        reader.join(1.0)
        with self._lock:
            self._process = None
        return failure


def _log(output: IO[str]) -> None:
    with output:
        for number, line in enumerate(output, 1):
            if number <= _MAX_LINES:
                logger.info("on_durable: %s", line.rstrip("\n"))
            elif number == _MAX_LINES + 1:
                logger.info("on_durable: its further output is not logged")


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and the processes of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        # The shell may end before what it has started, which then gets the second signal.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_S)
