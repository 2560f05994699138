"""Log of an agent: the format of its lines, and places where they are also written."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import platform
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_flashckpt.errors import FlashCkptError

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Lines that wait to be written elsewhere; further lines are only in the log file.
_MOST_WAITING = 1000
#: Seconds that an ending agent has for writing its last lines elsewhere.
_LAST_LINES_S = 2.0
#: Size at which the log in the save directory moves aside, and replaces the one before.
_ROTATE_NBYTES = 4 * 2**20
#: Name of the handler that writes there.
_SHARED = "shared-log"


class BriefFormatter(logging.Formatter):
    """Gives expected errors, such as those of a full disk, one line instead of a traceback.

    Messages of this package's errors and of the kernel's name the place. Other exceptions are
    defects, whose traceback is needed.
    """

    def __init__(self) -> None:
        super().__init__(_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of `record`; without a traceback if its error is an expected one."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FlashCkptError | OSError):
            text = record.getMessage()
            record = copy.copy(record)
            record.msg = text if str(error) in text else f"{text}: {error}"
            record.args = record.exc_info = record.exc_text = None
        return super().format(record)


class ErrorFlag(logging.Handler):
    """Remembers whether an error was logged, so that the log is kept."""

    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        """Note an error; records of lower levels do not come here."""
        self.seen = True


def begin(*handlers: logging.Handler) -> ErrorFlag:
    """Send the log of this process to `handlers`; return the flag of its errors."""
    errors = ErrorFlag(logging.ERROR)
    for handler in handlers:
        handler.setFormatter(BriefFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[*handlers, errors])
    return errors


class ThreadedHandler(logging.Handler):
    """Writes lines on a thread of its own.

    A blocked pipe (a stopped terminal, a log driver that hangs) or a storage that hangs must not
    stop the agent. Make it after the agent's last fork.
    """

    def __init__(self, name: str, write: Callable[[str], object]) -> None:
        """Start the thread.

        Args:
            name: name of the handler and its thread.
            write: writes one line with its end; its OSErrors are ignored.
        """
        super().__init__()
        self.set_name(name)
        self._write_line = write
        self._waiting: queue.Queue[str] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line; drop it if too many lines wait."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(self.format(record) + "\n")

    def last_lines(self) -> None:
        """Return when all lines are written, or are not accepted within `_LAST_LINES_S`."""
        deadline = time.monotonic() + _LAST_LINES_S
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write(self) -> None:
        while True:
            line = self._waiting.get()
            with contextlib.suppress(OSError):
                self._write_line(line)
            self._waiting.task_done()


def write_to_stderr(line: str) -> None:
    """Write a line to stderr."""
    os.write(2, line.encode(errors="backslashreplace"))


def path_in(root: str, host: str) -> Path:
    """Return the place of the log of `host` in the save directory `root`."""
    return Path(root) / f"flashckpt-agent-{host}.log"


def append_line(path: Path, line: str) -> None:
    """Append `line` to a file in the save directory, which outlives the node.

    The file is opened for each line, because the directory may be away for a while. At 4 MiB it
    replaces `<file>.1`, so a node has 8 MiB at most.

    Raises:
        OSError: the save directory is full or away.
    """
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(line)
        nbytes = file.tell()
    if nbytes >= _ROTATE_NBYTES:
        path.replace(path.with_name(f"{path.name}.1"))


def log_in_save_directory(root: str, on: bool) -> None:
    """Also log to the save directory `root` from now on, or no longer."""
    logger = logging.getLogger()
    present = [handler for handler in logger.handlers if handler.name == _SHARED]
    if on and not present:
        write = functools.partial(append_line, path_in(root, platform.node()))
        added = ThreadedHandler(_SHARED, write)
        added.setFormatter(BriefFormatter())
        logger.addHandler(added)
    for handler in () if on else present:
        logger.removeHandler(handler)


def last_lines() -> None:
    """Let all handlers with a thread write their last lines."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ThreadedHandler):
            handler.last_lines()
