"""Which directory a save directory is: its device and inode, beside its path.

Containers of one node may have different directories at one path, and a directory may be removed
and made anew, or replaced by a copy. An agent holds the memory of one of them and of no other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from megatron_flashckpt.error_classes import may_pass

#: Seconds between two looks at the path, and how many of them must find something else there.
_LOOK_S = 2.0
_LOOKS = 3
#: Pauses before a directory is looked at again, after errors which may pass.
_RETRIES_S = (0.1, 0.5, 2.0)


def ensure(root: str) -> None:
    """Create the directory, so that there is one to tell from others; or leave that to a save.

    Errors are waited out as in `identity_of`.
    """

    def make() -> str:
        os.makedirs(root, exist_ok=True)
        return ""

    _patiently(make)  # the check before the first step, or a save, says why there is none


def identity_of(root: str) -> str:
    """Return what tells the directory `root` from others on this node; empty if there is none.

    Errors that may pass are waited out for some seconds. With another identity the trainer would
    look for another agent, and start one, beside the agent that holds its memory.
    """
    return _patiently(lambda: _shown(os.stat(root)))


def resolved(root: str) -> str:
    """Return the path of `root` without links; errors are waited out as in `identity_of`."""
    return _patiently(lambda: os.path.realpath(root, strict=True)) or os.path.realpath(root)


def _patiently(look: Callable[[], str]) -> str:
    """Return `look()`, tried again after errors that may pass; empty if it fails all the same."""
    for pause_s in (*_RETRIES_S, None):
        try:
            return look()
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

    While it is open, no other directory of this node gets its inode number, also after somebody has
    removed it. It is opened in the background: storage that hangs must not keep trainers from the
    agent that holds their memory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._identity = ""
        self._asked = threading.Event()
        self._gone = 0
        threading.Thread(target=self._hold, name="save-directory", daemon=True).start()

    def is_gone(self) -> bool:
        """Return whether nothing, or another directory, is at the path since some seconds.

        Begins another look, and never waits for storage. Then no trainer can come back for the
        memory of this directory, and no save may be written to the other one.
        """
        self._asked.set()
        return self._gone >= _LOOKS

    def _hold(self) -> None:
        with contextlib.suppress(OSError):  # there is none: nothing to be told from others
            # Stays open as long as the process lives.
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._identity = _shown(os.fstat(fd))
            while True:
                self._asked.wait()
                self._gone = self._gone + 1 if self._is_elsewhere() else 0
                time.sleep(_LOOK_S)
                self._asked.clear()

    def _is_elsewhere(self) -> bool:
        try:
            return _shown(os.stat(self._root)) != self._identity
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # storage is in trouble, which may pass
            return False

    def why_not(self, identity: str) -> str | None:
        """Return why a trainer whose save directory is `identity` is not served; None: it is."""
        if not identity or not self._identity or identity == self._identity:
            return None
        return (
            f"this agent (pid {os.getpid()}) serves {self._root} ({self._identity}), which for the "
            f"trainer is another directory ({identity}); it was replaced just now, or is mounted "
            "differently: start the job again, or end this agent"
        )
