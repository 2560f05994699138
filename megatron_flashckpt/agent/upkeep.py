"""Upkeep of the agent's own files, which cleaners of temporary files remove when untouched.

A trainer that finds no socket starts another agent, which ends at once while the lock is held. So
trainers could neither reach nor replace an agent without a socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from megatron_flashckpt.agent import socket_dir
from megatron_flashckpt.agent.socket_dir import LOCK, LOG, SECOND_STARTS, SOCKET
from megatron_flashckpt.errors import AgentError

logger = logging.getLogger(__name__)

_BACKLOG = 128
#: Seconds between two checks of the own files, and of the directory that other processes find.
_LOOK_S = 1.0
_FIND_S = 30.0
#: Files untouched for this long are touched; the strictest cleaners remove files after a day.
_FRESH_S = 3600.0


class Upkeep:
    """Lock, socket and log of an agent. Used by one thread."""

    def __init__(
        self, directory: Path, runtime_dir: str | None, log_fds: tuple[int, ...] = (1, 2)
    ) -> None:
        """Take the lock.

        Args:
            directory: directory of the agents of this save directory.
            runtime_dir: the setting.
            log_fds: the descriptors by which this process writes to the log.

        Raises:
            BlockingIOError: another agent holds the lock.
            FileNotFoundError: another agent has just left and removed the directory.
        """
        self.directory = directory
        self._runtime_dir = runtime_dir
        self._log_fds = log_fds
        self._lock = _locked(directory)
        self._logs = self.writes_log
        self._socket: os.stat_result | None = None
        self._looked_at = self._found_at = time.monotonic()
        self._trouble = ""

    @property
    def writes_log(self) -> bool:
        """Return whether this process writes to the log file that others see."""
        try:
            return os.path.samestat(os.fstat(self._log_fds[-1]), os.stat(self.directory / LOG))
        except FileNotFoundError:
            return False

    def listen(self) -> socket.socket:
        """Return a new listening socket that replaces a former one; store the pid in the lock.

        Called after the fork, because the kernel reports the caller of `listen` to trainers.
        """
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
        path = self.directory / SOCKET
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            self._socket = path.lstat()
        except OSError:
            listener.close()
            raise
        return listener

    def restore_missing(self, key: str = "") -> socket.socket | None:
        """Restore missing files; return a new socket to listen on if there is one.

        Called often, checks every `_LOOK_S`. Never raises.

        Args:
            key: key of the save directory if it has changed; see `save_directory.key_of`.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return None
        self._looked_at = now
        try:
            return self._restore(now, key or self.directory.name)
        except (OSError, AgentError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.error("new trainers cannot find this agent: %s", error)
            return None

    def _restore(self, now: float, key: str) -> socket.socket | None:
        is_complete = (
            key == self.directory.name
            and self._has(LOCK, os.fstat(self._lock))
            and self._has(SOCKET, self._socket)
        )
        if not is_complete or now - self._found_at > _FIND_S:
            self._found_at = now
            directory = socket_dir.directory_of(key, self._runtime_dir, parents=False)
            is_complete = is_complete and directory == self.directory
            if not self._runtime_dir:
                _touch(*socket_dir.shared_paths(directory.name))
            if directory != self.directory or not self._has(LOCK, os.fstat(self._lock)):
                lock = _locked(directory)
                if key != self.directory.name:
                    self._move_to(directory)
                os.close(self._lock)
                self.directory, self._lock = directory, lock
        self._restore_log()
        own = [self.directory / name for name in (SOCKET, LOCK, LOG, SECOND_STARTS)]
        _touch(*own, self.directory, self.directory.parent)
        if is_complete:
            return None
        listener = self.listen()
        logger.info("restored %s, which had been removed", self.directory / SOCKET)
        self._trouble = ""
        return listener

    def _move_to(self, directory: Path) -> None:
        """Take the log along, and remove the other files, which trainers no longer look for."""
        for name in (SOCKET, LOCK):
            (self.directory / name).unlink(missing_ok=True)
        for name in (LOG, SECOND_STARTS):
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).rename(directory / name)
        socket_dir.leave(self.directory, self._runtime_dir)
        logger.info("moved from %s to %s", self.directory, directory)

    def _has(self, name: str, status: os.stat_result | None) -> bool:
        """Return whether the file with this status is still there under its name."""
        try:
            present = (self.directory / name).lstat()
        except FileNotFoundError:
            return False
        return status is not None and os.path.samestat(present, status)

    def _restore_log(self) -> None:
        if self._logs and not (self.directory / LOG).exists():
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self.directory / LOG, flags, 0o600)
            for log_fd in self._log_fds:
                os.dup2(fd, log_fd)
            os.close(fd)

    def leave(self, *, keep_log: bool) -> None:
        """Remove the socket, and without `keep_log` the log, the lock and the directory.

        The socket goes first: from then on, a new trainer finds no agent and starts one.
        """
        if self._has(LOCK, os.fstat(self._lock)):  # otherwise another agent uses it
            (self.directory / SOCKET).unlink(missing_ok=True)
            (self.directory / SECOND_STARTS).unlink(missing_ok=True)
            if not keep_log:
                (self.directory / LOG).unlink(missing_ok=True)
                (self.directory / LOCK).unlink(missing_ok=True)
                socket_dir.leave(self.directory, self._runtime_dir)
        os.close(self._lock)


def _locked(directory: Path) -> int:
    """Return the descriptor of the lock of `directory`, which this process now holds.

    Raises:
        BlockingIOError: another agent holds it.
        FileNotFoundError: another agent has just left.
    """
    path = directory / LOCK
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A leaving agent removes its files while it holds the lock. If that happened after the lock
        # was opened, other processes see another lock file.
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(f"{path}: its agent has just left")
    except BlockingIOError as error:
        os.close(fd)
        raise BlockingIOError(f"{path}: another agent holds the lock") from error
    except OSError:
        os.close(fd)
        raise
    return fd


def _touch(*paths: Path) -> None:
    """Touch files that a cleaner might soon remove as old."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > _FRESH_S:
                os.utime(path, follow_symlinks=False)
