"""Table of storage error numbers: their meaning, and the remedy for each.

Decisions by error number use this table: whether to retry, whether a load falls back to an older
checkpoint, and whether a file system lacks an operation. Messages end with its remedies.
"""

from __future__ import annotations

import errno
from typing import Literal, NamedTuple

#: `transient`: storage, or the network to it, is unavailable; stored data may be intact.
#: `gone`: the file does not exist, or no longer.
#: `damage`: the bytes are lost, or the path is not a file.
#: `full`: no space or quota is left.
#: `refused`: this user or this mount has no permission.
#: `not supported`: this file system does not support the operation.
#: `scarce`: this process or node has run out of descriptors or memory.
#: `unexpected`: all other numbers.
Kind = Literal[
    "transient", "gone", "damage", "full", "refused", "not supported", "scarce", "unexpected"
]


class ErrorClass(NamedTuple):
    """Meaning of one error number."""

    kind: Kind
    remedy: str
    may_pass: bool = False
    """True if a retry may succeed. If retries fail, `kind` has the meaning."""


_AWAY = ErrorClass(
    "transient",
    "storage is unavailable: check the file system's servers and this node's mount, then try again",
    may_pass=True,
)
_BUSY = ErrorClass("transient", "storage was busy for too long: try again", may_pass=True)
_UNSUPPORTED = ErrorClass(
    "not supported",
    "this file system does not support that: save to one that is shared by all nodes, renames "
    "files, and writes at any position of a file",
)
_PERMISSION = "give this user write permission there"
_IN_THE_WAY = "a file stands where a directory should be: move it away"
#: Class of all numbers that are not in the table.
DEFAULT = ErrorClass(
    "unexpected",
    "no file system should report this error: check the kernel's log (dmesg), the file system's "
    "servers and this node's mount",
)

#: Classes by error number. Network file systems report the first ones while a server or the network
#: is unavailable. NFS and Lustre then also report EIO (soft mount, eviction) and ESTALE (another
#: host replaced the file), which have another meaning if they persist.
TABLE: dict[int, ErrorClass] = {
    errno.EAGAIN: _BUSY,
    errno.EINTR: _BUSY,
    errno.EBUSY: _BUSY,
    errno.ENOLCK: _BUSY,
    errno.ETIMEDOUT: _AWAY,
    errno.ENOTCONN: _AWAY,
    errno.ESHUTDOWN: _AWAY,
    errno.EREMOTEIO: _BUSY,  # Linux's NFSv4 client for NFS4ERR_RESOURCE, a lack in the server
    errno.EHOSTDOWN: _AWAY,
    errno.EHOSTUNREACH: _AWAY,
    errno.ENETDOWN: _AWAY,
    errno.ENETUNREACH: _AWAY,
    errno.ENETRESET: _AWAY,
    errno.ECONNREFUSED: _AWAY,
    errno.ECONNRESET: _AWAY,
    errno.ECONNABORTED: _AWAY,
    errno.EPIPE: _AWAY,
    errno.ECOMM: _AWAY,
    errno.ENOENT: ErrorClass("gone", "find out which program removed it"),
    errno.ESTALE: ErrorClass(
        "gone",
        "the server no longer knows this file: find out which program removed or replaced "
        "it, or mount the file system again",
        may_pass=True,
    ),
    errno.EIO: ErrorClass(
        "damage",
        "the device or its server reports an I/O error: check it before the next save",
        may_pass=True,
    ),
    errno.EUCLEAN: ErrorClass("damage", "the file system is damaged: check it (fsck)"),
    errno.EBADMSG: ErrorClass("damage", "the file system is damaged: check it (fsck)"),
    errno.ENOTDIR: ErrorClass("damage", _IN_THE_WAY),
    errno.EEXIST: ErrorClass("unexpected", _IN_THE_WAY),
    errno.EISDIR: ErrorClass("damage", "a directory stands where a file should be: move it away"),
    errno.ENXIO: ErrorClass(
        "damage", "a socket or device stands where a file should be: move it away"
    ),
    errno.ESPIPE: ErrorClass(
        "damage", "a pipe or device stands where a file should be: move it away"
    ),
    errno.ELOOP: ErrorClass("damage", "a symbolic link stands where a file should be: remove it"),
    errno.ENOSPC: ErrorClass(
        "full", "free space there or save elsewhere ('df -i' shows whether inodes ran out)"
    ),
    errno.EDQUOT: ErrorClass("full", "raise the quota or save elsewhere"),
    errno.EFBIG: ErrorClass(
        "full",
        "raise the file size limit (ulimit -f) of the user that starts the job, or save to a file "
        "system that allows larger files",
    ),
    errno.EROFS: ErrorClass(
        "refused", "the file system is read-only: remount it or save elsewhere"
    ),
    errno.EACCES: ErrorClass("refused", _PERMISSION),
    errno.EPERM: ErrorClass(
        "refused",
        f"{_PERMISSION}; if the user has it, the file system refuses the operation: save elsewhere",
    ),
    errno.ENAMETOOLONG: ErrorClass("refused", "save to a directory with a shorter path"),
    errno.EINVAL: _UNSUPPORTED,
    errno.ENOSYS: _UNSUPPORTED,
    errno.EOPNOTSUPP: _UNSUPPORTED,
    errno.ENOTTY: _UNSUPPORTED,
    errno.EXDEV: _UNSUPPORTED,
    errno.EMFILE: ErrorClass(
        "scarce", "raise the limit on open files (ulimit -n) of the user that starts the job"
    ),
    errno.ENFILE: ErrorClass(
        "scarce", "the node has too many open files: end programs that hold them (see lsof)"
    ),
    errno.ENOBUFS: ErrorClass("scarce", "free memory on this node"),
    errno.ENOMEM: ErrorClass("scarce", "free memory on this node"),
}


def class_of(error: BaseException | int | None) -> ErrorClass:
    """Return the class of an error, or of an error number; `DEFAULT` if the table has none."""
    number = error.errno if isinstance(error, OSError) else error
    return TABLE.get(number, DEFAULT) if isinstance(number, int) else DEFAULT


def may_pass(error: BaseException) -> bool:
    """Return whether a retry of the operation that raised `error` may succeed."""
    return class_of(error).may_pass


def is_unsupported(error: BaseException) -> bool:
    """Return whether `error` means that the file system does not support the operation."""
    return class_of(error).kind == "not supported"


def is_scarce(error: BaseException) -> bool:
    """Return whether `error` means that this process or node has run out of a resource."""
    return class_of(error).kind == "scarce"


def will_last(error: BaseException | int) -> bool:
    """Return whether only a person can remove the cause of `error`, or of an error number."""
    return class_of(error).kind in ("full", "refused", "not supported")
