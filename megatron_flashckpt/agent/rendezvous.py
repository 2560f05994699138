"""Where an agent and its trainers find each other: a private directory per save directory.

    /tmp/flashckpt-<uid>/<16 hex digits of the save directory>/agent.sock   the socket
                                                              lock          held by the agent
                                                              agent.log     what it says

The directory is keyed by the save directory, so that a restarted job finds the agent that holds
its memory. No ports and no shared-memory names: nothing to clash with, nothing to guess.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import xxhash

from megatron_flashckpt.errors import AgentError

SOCKET = "agent.sock"
LOCK = "lock"
LOG = "agent.log"

#: unix(7): 108 with the final zero.
_MAX_SOCKET_PATH_NBYTES = 107


def private_directory(path: Path) -> Path:
    """Create `path` (mode 0700) or check that nobody else can reach into it.

    Raises:
        AgentError: it is a link, belongs to another user, or is open to others.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise AgentError(
            f"{path}: cannot be created ({error.strerror}); set 'runtime_dir' to a directory "
            "on this node that this user can write"
        ) from error
    try:
        status = path.lstat()
    except FileNotFoundError:
        return private_directory(path)  # the agent that it was of has just left
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise AgentError(
            f"{path}: is not a directory of user {os.getuid()}; remove it or set 'runtime_dir'"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise AgentError(
            f"{path}: other users can reach it (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run 'chmod 700 {path}' or set 'runtime_dir'"
        )
    return path


def agent_directory(root: str, runtime_dir: str | None) -> Path:
    """Return the private directory of the agent for save directory `root` on this node.

    Raises:
        AgentError: it is not private, or its path is too long for a socket.
    """
    base = Path(runtime_dir or f"/tmp/flashckpt-{os.getuid()}").absolute()
    directory = base / xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(root)))
    if len(os.fsencode(directory / SOCKET)) > _MAX_SOCKET_PATH_NBYTES:
        raise AgentError(
            f"{directory / SOCKET}: more than {_MAX_SOCKET_PATH_NBYTES} bytes, too long for a "
            "socket; set 'runtime_dir' to a shorter path"
        )
    private_directory(base)
    return private_directory(directory)
