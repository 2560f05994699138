"""Accepts the agent's connections, and survives every failure of one of them.

The agent holds the only copy of a checkpoint when its trainers are dead. So a flood of connections,
a silent peer, or a lack of descriptors or threads must not end it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
import time

from megatron_flashckpt.error_classes import is_scarce

logger = logging.getLogger(__name__)

#: Connections without a greeting. Trainers greet at once, and are at most some dozens.
MOST_SILENT = 64
#: Time limit for each part of a greeting.
GREETING_S = 5.0
#: A greeting has about 20 bytes.
GREETING_NBYTES = 1024
#: Upper bound of an agent's descriptors; the limits of some daemons exceed a billion.
_FILES = 2**16
#: Seconds between two log lines about refused connections.
_LOG_EVERY_S = 60.0


def raise_limit() -> None:
    """Raise this process's limit on open files: every slab and connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class SilentConnections:
    """Connections that have not greeted yet; if there are too many, the oldest are closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, socket.socket] = {}
        self._unlogged = 0
        self._logged_at = -_LOG_EVERY_S

    def add(self, connection: socket.socket) -> None:
        """Expect a greeting of `connection` within `GREETING_S`."""
        connection.settimeout(GREETING_S)
        with self._lock:
            self._waiting[id(connection)] = connection
        self._close_oldest(MOST_SILENT, f"more than {MOST_SILENT} connections send no greeting")

    def remove(self, connection: socket.socket) -> None:
        """Forget `connection`, which has greeted or is about to be closed. May be repeated."""
        with self._lock:
            self._waiting.pop(id(connection), None)

    def close_all(self, reason: str) -> None:
        """Free the descriptors of all connections without a greeting."""
        self._close_oldest(0, reason)

    def _close_oldest(self, most: int, reason: str) -> None:
        with self._lock:
            surplus = list(self._waiting.values())[: max(0, len(self._waiting) - most)]
            for connection in surplus:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # the connection's own thread closes it
        if surplus:
            self.log_refused(reason, len(surplus))

    def log_refused(self, reason: str, count: int = 1) -> None:
        """Log refused connections; a flood of them does not fill the log."""
        with self._lock:
            self._unlogged += count
            now = time.monotonic()
            if now - self._logged_at < _LOG_EVERY_S:
                return
            count, self._unlogged, self._logged_at = self._unlogged, 0, now
        logger.warning("refused %d connections: %s", count, reason)


class Acceptor:
    """Accepts connections one at a time, on one thread."""

    def __init__(self, silent: SilentConnections) -> None:
        self._silent = silent
        #: Spare descriptor. Without another free descriptor, this one is closed to accept a
        #: connection and close it: while that connection waits in the queue, the kernel reports the
        #: same error for ever.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Free the spare descriptor."""
        if self._spare >= 0:
            os.close(self._spare)

    def accept(self, listener: socket.socket, within_s: float) -> socket.socket | None:
        """Return the next connection; None if none came or none could be accepted."""
        try:
            listener.settimeout(within_s)
            return listener.accept()[0]
        except TimeoutError:
            return None
        except OSError as error:
            if is_scarce(error):
                self._refuse(listener, str(error))
            else:
                # The peer has closed already (ECONNABORTED), or the kernel has another reason.
                self._silent.log_refused(str(error))
                time.sleep(within_s)
            return None

    def _refuse(self, listener: socket.socket, reason: str) -> None:
        self._silent.close_all(reason)
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            listener.settimeout(0.0)
            listener.accept()[0].close()
            self._silent.log_refused(reason)
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if self._spare < 0:
            time.sleep(0.01)  # until threads have closed their connections
