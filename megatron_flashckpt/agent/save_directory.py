"""Identity of a save directory: its device and inode, in addition to its path.

Containers of one node may have different directories at one path. A directory may also be removed
and made again, or replaced by a copy. An agent holds memory for exactly one of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from megatron_flashckpt.error_classes import may_pass

#: Seconds between two checks of the path, and the number of failed checks after which it is gone.
_LOOK_S = 2.0
_LOOKS = 3
#: Pauses before a directory is examined again, after transient errors.
_RETRIES_S = (0.1, 0.5, 2.0)


def ensure(root: str) -> None:
    """Create the directory, so that it has an identity. Never raises.

    Errors are waited out as in `identity_of`.
    """

    def make() -> str:
        os.makedirs(root, exist_ok=True)
        return ""

    _with_retries(make)  # the check before the first step, or a save, reports the error


def identity_of(root: str) -> str:
    """Return the identity of the directory `root` on this node; empty if it does not exist.

    Transient errors are waited out for some seconds. With a wrong identity the trainer would start
    a second agent, while the first one holds its memory.
    """
    return _with_retries(lambda: _shown(os.stat(root)))


def resolved(root: str) -> str:
    """Return the path of `root` without links; errors are waited out as in `identity_of`."""
    return _with_retries(lambda: os.path.realpath(root, strict=True)) or os.path.realpath(root)


def _with_retries(call: Callable[[], str]) -> str:
    """Return `call()`, repeated after errors that may pass; empty if it still fails."""
    for pause_s in (*_RETRIES_S, None):
        try:
            return call()
        except OSError as error:
            if pause_s is None or not may_pass(error):
                break
            time.sleep(pause_s)
    return ""


def _shown(status: os.stat_result) -> str:
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return f"device {device}, inode {status.st_ino}"


class HeldDirectory:
    """The save directory of an agent, held open.

    While the directory is open, no other directory of this node gets its inode number, even if it
    was removed. A thread opens it, because storage that hangs must not keep trainers from the agent
    that holds their memory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._identity = ""
        self._asked = threading.Event()
        self._closing = False
        self._gone = 0
        threading.Thread(target=self._hold, name="save-directory", daemon=True).start()

    def is_gone(self) -> bool:
        """Return whether the path has been missing, or another directory, for some seconds.

        Starts another check without waiting for storage. If it is gone, no trainer can return for
        the memory of this directory, and no save may be written to the other one.
        """
        self._asked.set()
        return self._gone >= _LOOKS

    def close(self) -> None:
        """Let the thread close the directory, without waiting for storage."""
        self._closing = True
        self._asked.set()

    def _hold(self) -> None:
        with contextlib.suppress(OSError):  # no directory, so no identity
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._identity = _shown(os.fstat(fd))
                while not self._closing:
                    self._asked.wait()
                    self._gone = self._gone + 1 if self._is_elsewhere() else 0
                    time.sleep(_LOOK_S)
                    self._asked.clear()
            finally:
                os.close(fd)

    def _is_elsewhere(self) -> bool:
        try:
            return _shown(os.stat(self._root)) != self._identity
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a storage error, which may pass
            return False

    def why_not(self, identity: str) -> str | None:
        """Return the reason to refuse a trainer with save directory `identity`; None: serve it."""
        if not identity or not self._identity or identity == self._identity:
            return None
        return (
            f"this agent (pid {os.getpid()}) serves {self._root} ({self._identity}), but at that "
            f"path the trainer has another directory ({identity}); it was replaced just now, or is "
            "mounted differently: start the job again, or end this agent"
        )
