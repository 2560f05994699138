"""Identity of a save directory: its device and inode, in addition to its path.

A URL is its own identity: nothing is mounted over it, and the bucket's server knows no other one.

Containers of one node may have different directories at one path. A directory may also be removed
and made again, or replaced by a copy. An agent holds memory for exactly one of them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import xxhash

from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.storage.opening import is_url

logger = logging.getLogger(__name__)

#: Seconds between two checks of the path.
_LOOK_S = 2.0
#: Pauses before a directory is examined again, after transient errors.
_RETRIES_S = (0.1, 0.5, 2.0)


def ensure(root: str) -> None:
    """Create the directory, so that it has an identity. Never raises.

    Errors are waited out as in `identity_of`.
    """

    def made() -> str:
        make(root)
        return ""

    _with_retries(made)  # the check before the first step, or a save, reports the error


def make(root: str) -> None:
    """Create the directory if it is missing; a bucket has none."""
    if not is_url(root):
        os.makedirs(root, exist_ok=True)


def identity_of(root: str) -> str:
    """Return the identity of the directory `root` on this node; empty if it does not exist.

    Transient errors are waited out for some seconds. With a wrong identity the trainer would start
    a second agent, while the first one holds its memory.
    """
    return root if is_url(root) else _with_retries(lambda: _shown(os.stat(root)))


def resolved(root: str) -> str:
    """Return the path of `root` without links; errors are waited out as in `identity_of`."""
    if is_url(root):
        return root
    return _with_retries(lambda: os.path.realpath(root, strict=True)) or os.path.realpath(root)


def key_of(root: str, identity: str | None = None) -> str:
    """Return the key of save directory `root`: 16 hex digits of its path, 16 of its identity.

    Args:
        identity: of the save directory; None: what `identity_of` returns.
    """
    identity = identity_of(root) if identity is None else identity
    parts = os.fsencode(resolved(root)), identity.encode()
    return "-".join(xxhash.xxh3_64_hexdigest(part) for part in parts)


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


def _has_no_name(fd: int) -> bool:
    """Return whether the open directory was removed."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:  # a storage error, which may pass
        return False


class HeldDirectory:
    """The save directory of an agent, held open.

    While the directory is open, no other directory of this node gets its inode number, even if it
    was removed. A thread opens it, because storage that hangs must not keep trainers from the agent
    that holds their memory.

    A file system that is mounted again, by hand or by an automounter, may have another device
    number. So a directory that has the object of the agent's newest run is the same directory.
    """

    def __init__(self, root: str, has_own_run: Callable[[], bool]) -> None:
        """Open `root`, in a thread.

        Args:
            has_own_run: returns whether the directory at `root` has the object of the newest run.
        """
        self._root = root
        self._has_own_run = has_own_run
        self.identity = ""
        """Identity of the directory; empty until it is open."""
        self.key = ""
        """Key of the directory (`key_of`), if it has come back with another identity."""
        self._asked = threading.Event()
        self._closing = False
        self._is_away = False
        self._is_removed = False
        if is_url(root):
            self.identity = root  # for ever, so nothing is held
            return
        threading.Thread(target=self._hold, name="save-directory", daemon=True).start()

    def look(self) -> None:
        """Start another check of the path, without waiting for storage."""
        self._asked.set()

    def is_removed(self) -> bool:
        """Return whether the directory has no name left, so that it cannot come back.

        A directory that is renamed or unmounted keeps its names. Starts another check.
        """
        self.look()
        return self._is_removed

    def close(self) -> None:
        """Let the thread close the directory, without waiting for storage."""
        self._closing = True
        self._asked.set()

    def _hold(self) -> None:
        fd: int | None = None
        while fd is None and not self._closing:
            try:
                fd, self.identity = self._opened()
            except (FileNotFoundError, NotADirectoryError):  # no directory, so no identity
                return
            except OSError:  # a storage error, which may pass
                time.sleep(_LOOK_S)
        while fd is not None and not self._closing:
            self._asked.wait()
            self._asked.clear()
            is_elsewhere = self._is_elsewhere()
            self._is_removed = is_elsewhere and _has_no_name(fd)
            if not is_elsewhere:
                self._is_away = False
            elif (opened := self._returned()) is not None:
                os.close(fd)
                fd, self.identity = opened
                self._is_away = self._is_removed = False
                self.key = key_of(self._root, self.identity)
                logger.info("%s is back (%s)", self._root, self.identity)
            elif not self._is_away:
                self._is_away = True
                logger.warning(
                    "%s is away, or another directory is in its place; it may come back",
                    self._root,
                )
            time.sleep(_LOOK_S)
        if fd is not None:
            os.close(fd)

    def _opened(self) -> tuple[int, str]:
        """Return a descriptor of the directory, and its identity."""
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return fd, _shown(os.fstat(fd))
        except OSError:
            os.close(fd)
            raise

    def _is_elsewhere(self) -> bool:
        try:
            return _shown(os.stat(self._root)) != self.identity
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a storage error, which may pass
            return False

    def _returned(self) -> tuple[int, str] | None:
        """Return what `_opened` returns if the directory has come back with another identity."""
        try:
            return self._opened() if self._has_own_run() else None
        except (OSError, FlashCkptError):
            return None

    def why_not(self, identity: str) -> str | None:
        """Return the reason to refuse a trainer with save directory `identity`; None: serve it."""
        if not identity or not self.identity or identity == self.identity:
            return None
        return (
            f"this agent (pid {os.getpid()}) serves {self._root} ({self.identity}), but at that "
            f"path the trainer has another directory ({identity}); it was replaced just now, or is "
            "mounted differently: start the job again, or end this agent"
        )
