"""Private directory of an agent, one per save directory, with the socket for its trainers.

    <base>/<16 hex digits of the save directory>/agent.sock   the socket
                                                 lock         held by the agent; holds its pid
                                                 agent.log    its log
                                                 second-starts.json   former processes of ranks

The key is derived from the save directory, so that a restarted job finds the agent that holds its
memory. It covers path and identity, because another directory may be at that path in another
container of the node, or later. There are no ports and no shared-memory names, which could clash or
be guessed.

A directory with two paths, through bind mounts, has an agent for each path: where one agent runs,
the other path may lead elsewhere. The two agents work together like agents of two nodes, and the
claim decides which one may write.

All processes of a user on a node must find the same directory. Only some of them have
`XDG_RUNTIME_DIR` (a login shell has it, `srun` and cron do not). So there is one shared base that
all of them see, `/tmp/flashckpt-<uid>`. An agent prefers a directory below `XDG_RUNTIME_DIR`, which
no cleaner empties; then the shared base holds a symbolic link to that directory. If another user
has taken the name of the shared base, it is `/tmp/flashckpt-<uid>-<time>-<random>` instead. The
user's processes find that base by its owner, because no other user can create it for this user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_flashckpt.agent.save_directory import key_of
from megatron_flashckpt.error_classes import class_of
from megatron_flashckpt.errors import AgentError

SOCKET = "agent.sock"
LOCK = "lock"
LOG = "agent.log"
SECOND_STARTS = "second-starts.json"

#: unix(7): 108 with the final zero byte.
_MAX_SOCKET_PATH_NBYTES = 107
_TEMPORARY = Path("/tmp")
#: Longest wait for the lock of the temporary directory, and the pause between two attempts.
_LOCK_S = 5.0
_LOCK_RETRY_S = 0.01
#: Attempts to agree with other processes that look for a directory at the same moment.
_ATTEMPTS = 20


def private_directory(path: Path, *, parents: bool = True) -> Path:
    """Create `path` (mode 0700), or check that no other user can access it.

    Raises:
        AgentError: `path` is a link, belongs to another user, or is open to others.
    """
    try:
        path.mkdir(mode=0o700, parents=parents)
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
        return private_directory(path, parents=parents)  # its agent has just removed it
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
        AgentError: the directory is not private, or its path is too long for a socket.
    """
    return directory_of(key_of(root), runtime_dir)


def directory_of(key: str, runtime_dir: str | None, *, parents: bool = True) -> Path:
    """Return the directory for `key`, creating it if it is missing; see `agent_directory`.

    Args:
        parents: also create the parent directories of `runtime_dir`.
    """
    if runtime_dir:
        base = Path(runtime_dir).absolute()
        if _is_too_long(base / key):
            raise AgentError(
                f"{base / key / SOCKET}: more than {_MAX_SOCKET_PATH_NBYTES} bytes, too long for a "
                "socket; set 'runtime_dir' to a shorter path"
            )
        private_directory(base, parents=parents)
        return private_directory(base / key)
    preferred = _of_session()
    if preferred is not None and _is_too_long(preferred / key):
        preferred = None
    entry = _shared_base() / key
    for _ in range(_ATTEMPTS):
        existing = _entered(entry)
        if existing is not None:
            return existing
        if preferred is None:
            if (made := _made(entry)) is not None:
                return made
            continue
        place = private_directory(private_directory(preferred) / key)
        with contextlib.suppress(FileExistsError):
            entry.symlink_to(place)
            return place
        # Another process was faster and may have had another environment.
        if _entered(entry) != place:
            with contextlib.suppress(OSError):
                place.rmdir()
    raise AgentError(
        f"{entry}: other processes create and remove it all the time; set 'runtime_dir'"
    )


def log_on_this_node(root: str, runtime_dir: str | None) -> Path | None:
    """Return the log of this node's agent for `root`, or None. Creates nothing."""
    usual = _TEMPORARY / f"flashckpt-{os.getuid()}"
    bases = [*_own_replacements(usual.name), usual]
    for base in [Path(runtime_dir).absolute()] if runtime_dir else bases:
        log = base / key_of(root) / LOG
        if log.exists():
            return log.resolve()
    return None


def open_log(directory: Path) -> int:
    """Return a descriptor that appends to the agent's log in `directory`.

    Raises:
        FileNotFoundError: an agent has just left and removed the directory.
        AgentError: the log cannot be opened; the message has the remedy.
    """
    log = directory / LOG
    try:
        return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        remedy = "free space there, or set 'runtime_dir' to a directory on another file system"
        if class_of(error).kind == "scarce":
            remedy = class_of(error).remedy
        raise AgentError(
            f"{log}: cannot be opened ({error.strerror}), so no agent can be started; {remedy}"
        ) from error


def leave(directory: Path, runtime_dir: str | None) -> None:
    """Remove the empty directory of an agent that has ended, and the link to it."""
    with contextlib.suppress(OSError):
        directory.rmdir()
    if not runtime_dir and not directory.exists():
        with contextlib.suppress(OSError, AgentError):
            entry = _shared_base() / directory.name
            if entry.is_symlink() and Path(os.readlink(entry)) == directory:
                entry.unlink()


def shared_paths(key: str) -> list[Path]:
    """Return the shared base, and its entry for the directory `key`."""
    base = _shared_base()
    return [base, base / key]


def holder(directory: Path) -> int | None:
    """Return the pid of the agent that holds the lock of `directory`; None if none does.

    0: the lock is held, but its file has no pid.
    """
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(fd, 32).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(fd)
    return None


def _is_too_long(directory: Path) -> bool:
    return len(os.fsencode(directory / SOCKET)) > _MAX_SOCKET_PATH_NBYTES


def _of_session() -> Path | None:
    """Return the base below `XDG_RUNTIME_DIR`, if that is a private directory of this user."""
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(named) or not _is_private(Path(named)):
        return None
    base = Path(named) / "flashckpt"
    usable = _is_private(base) if os.path.lexists(base) else os.access(named, os.W_OK | os.X_OK)
    return base if usable else None


def _shared_base() -> Path:
    """Return the base that all processes of this user find, in any environment."""
    usual = _TEMPORARY / f"flashckpt-{os.getuid()}"
    # Look for substitutes first: once a process had to create one, all others use it.
    if others := _own_replacements(usual.name):
        return others[0]
    try:
        return private_directory(usual)
    except AgentError:
        with _creation_lock():
            if others := _own_replacements(usual.name):
                return others[0]
            name = f"{usual.name}-{time.time_ns():016x}-{secrets.token_hex(4)}"
            made = private_directory(_TEMPORARY / name)
    first = _own_replacements(usual.name)[0]
    if first != made:  # the lock was held for long, and another process did not wait either
        with contextlib.suppress(OSError):
            made.rmdir()
    return first


@contextlib.contextmanager
def _creation_lock() -> Iterator[None]:
    """Keep other processes of this machine from creating a shared base meanwhile.

    The lock is that of the temporary directory itself, which no user can remove. The wait is short,
    because every user can hold this lock.
    """
    fd = os.open(_TEMPORARY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(fd)


def _own_replacements(usual: str) -> list[Path]:
    """Return the private directories of this user that replace `usual`, oldest first."""
    with os.scandir(_TEMPORARY) as entries:
        names = sorted(entry.name for entry in entries if entry.name.startswith(f"{usual}-"))
    return [path for name in names if _is_private(path := _TEMPORARY / name)]


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not stat.S_IMODE(status.st_mode) & 0o077
    )


def _entered(entry: Path) -> Path | None:
    """Return the directory of an entry of the shared base, through its link; None if missing."""
    if entry.is_symlink():
        with contextlib.suppress(OSError):
            place = Path(os.readlink(entry))
            if _is_private(place):
                return place
            entry.unlink()  # the session is over, or the agent has left
        return None
    return _made(entry) if os.path.lexists(entry) else None


def _made(entry: Path) -> Path | None:
    """Return the directory at an entry of the shared base, creating it if it is missing.

    Returns None if another process has just made the entry a link to a directory of its session.

    Raises:
        AgentError: the directory is not private.
    """
    try:
        return private_directory(entry)
    except AgentError:
        if entry.is_symlink():
            return None
        raise
