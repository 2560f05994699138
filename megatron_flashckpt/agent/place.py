"""Place of an agent: the socket where its trainers find it, and its log.

The socket has a name without a file (an abstract name, see unix(7)), made of the user and the save
directory, so that a restarted job finds the agent that holds its memory:

    @flashckpt-<uid>-<16 hex digits of the path>-<16 hex digits of the directory's identity>

Only one socket can have a name, so a bound name is also the agent's lock. The kernel frees the name
with the agent, and no cleaner can remove it. A directory with two paths, through bind mounts, has
an agent for each path: where one agent runs, the other path may lead elsewhere. The two agents work
together like agents of two nodes.

All processes of one network namespace see the name, and any user may take it first. So both sides
ask the kernel for the user of the other. The setting `runtime_dir` becomes part of the name, which
leads around a name that is taken.

The log is a file in `runtime_dir`, or in `/tmp/flashckpt-<uid>`. An agent that ends without an
error removes its log.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import stat
from pathlib import Path
from typing import NamedTuple

import xxhash

from megatron_flashckpt.agent import frames
from megatron_flashckpt.agent.held_directory import key_of
from megatron_flashckpt.error_classes import class_of
from megatron_flashckpt.errors import AgentError

logger = logging.getLogger(__name__)

_TEMPORARY = Path("/tmp")
_SOCKETS = Path("/proc/net/unix")


class Place(NamedTuple):
    """The place of the agent of one save directory on this node."""

    key: str
    """Key of the save directory; see `save_directory.key_of`."""
    runtime_dir: str | None
    """The setting, as an absolute path."""

    def __str__(self) -> str:
        """Return the name of the socket, as `ss -xl` shows it."""
        apart = os.fsencode(self.runtime_dir or "")
        part = f"{xxhash.xxh3_64_hexdigest(apart)[:8]}-" if apart else ""
        return f"@flashckpt-{os.getuid()}-{part}{self.key}"

    @property
    def name(self) -> bytes:
        """The address of the socket."""
        return b"\0" + str(self)[1:].encode()

    @property
    def log(self) -> Path:
        """The agent's log."""
        base = self.runtime_dir or _TEMPORARY / f"flashckpt-{os.getuid()}"
        return Path(base) / f"agent-{self.key}.log"

    def connect(self, sock: socket.socket) -> None:
        """Connect `sock` to the agent.

        Raises:
            ConnectionRefusedError: no agent listens.
            AgentError: another user has taken the name.
        """
        sock.connect(self.name)
        if (uid := frames.peer(sock).uid) != os.getuid():
            raise AgentError(
                f"{self}: user {uid} has taken this name of the agent's socket; end that process, "
                "or set 'runtime_dir' to any other directory, which changes the name"
            )

    def listener(self) -> frames.Peer | None:
        """Return the process of the agent; None if no agent listens.

        Raises:
            AgentError: another user has taken the name.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(0.0)
            try:
                self.connect(sock)
            except ConnectionRefusedError:
                return None
            except BlockingIOError:  # an agent that has accepted no connection for long
                return frames.Peer(0, os.getuid())
            return frames.peer(sock)

    def agents_elsewhere(self) -> list[int]:
        """Return the agents at the same path for directories with another identity."""
        path, _, own = self.key.partition("-")
        same_path = re.escape(str(self).removesuffix(own))
        try:
            sockets = _SOCKETS.read_text(errors="replace")  # other users may use any bytes
        except OSError:
            return []
        agents = []
        for identity in {*re.findall(rf" {same_path}([0-9a-f]{{16}})\n", sockets)} - {own}:
            with contextlib.suppress(AgentError):  # another user's
                agent = Place(f"{path}-{identity}", self.runtime_dir).listener()
                agents += [] if agent is None else [agent.pid]
        return agents

    def prepare(self) -> None:
        """Create the directory of the log (mode 0700), or check that it is private.

        Raises:
            AgentError: it is a link, belongs to another user, or is open to others.
        """
        path = self.log.parent
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.lstat()
        except FileExistsError:  # a file, or a link to nowhere
            status = path.lstat()
        except OSError as error:
            raise AgentError(
                f"{path}: cannot be created ({error.strerror}); set 'runtime_dir' to a directory "
                "on this node that this user can write"
            ) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise AgentError(
                f"{path}: is not a directory of user {os.getuid()}; remove it or set 'runtime_dir'"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise AgentError(
                f"{path}: other users can reach it (mode {stat.S_IMODE(status.st_mode):04o}); "
                f"run 'chmod 700 {path}' or set 'runtime_dir'"
            )

    def open_log(self) -> int:
        """Return a descriptor that appends to the agent's log.

        Raises:
            AgentError: the log cannot be opened; the message has the remedy.
        """
        self.prepare()
        try:
            return os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            remedy = "free space there, or set 'runtime_dir' to a directory on another file system"
            if class_of(error).kind == "scarce":
                remedy = class_of(error).remedy
            raise AgentError(
                f"{self.log}: cannot be opened ({error.strerror}), so no agent can be started; "
                f"{remedy}"
            ) from error


def place_of(root: str, runtime_dir: str | None) -> Place:
    """Return the place of this node's agent for save directory `root`."""
    return Place(key_of(root), os.path.abspath(runtime_dir) if runtime_dir else None)


class PlaceTakenError(Exception):
    """Another process has the name of the socket."""


class AgentSocket:
    """The socket of an agent, which follows its save directory. Used by one thread."""

    def __init__(self, place: Place) -> None:
        """Take the name.

        Raises:
            PlaceTakenError: another process has it.
        """
        self.place = place
        self.socket = _bound(place)
        self._trouble = ""

    def listen(self) -> None:
        """Let trainers connect: the kernel reports the calling process to them as their agent."""
        self.socket.listen()

    def follow(self, key: str) -> None:
        """Move to the place of `key`, a new key of the save directory. Never raises.

        Args:
            key: empty if there is none.
        """
        if not key or key == self.place.key:
            return
        place = self.place._replace(key=key)
        try:
            moved = _bound(place)
        except (OSError, PlaceTakenError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.error("new trainers cannot find this agent: %s", error)
            return
        moved.listen()
        try:
            self.place.log.rename(place.log)
        except OSError as error:
            logger.warning("the log stays at %s: %s", self.place.log, error)
        logger.info("moved from %s to %s", self.place, place)
        self.socket.close()  # last: now another agent may take this place, and write its log
        self.place, self.socket = place, moved

    def leave(self, *, keep_log: bool) -> None:
        """Give up the name; before that, without `keep_log`, remove the log."""
        if not keep_log:
            self.place.log.unlink(missing_ok=True)
        self.socket.close()


def _bound(place: Place) -> socket.socket:
    """Return a socket that has the name of `place`.

    Raises:
        PlaceTakenError: another process has it.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(place.name)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise PlaceTakenError(f"{place}: another process has this name") from error
        raise
    return bound
