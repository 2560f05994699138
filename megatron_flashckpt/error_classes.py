"""The one table of what storage's error numbers mean, and what a person can do about each.

Everything that decides by an error number asks here: what is retried, what makes a load use an
older checkpoint, what a file system does not support, and the remedy that a message ends with.
"""

from __future__ import annotations

import errno
from typing import Literal, NamedTuple

#: `transient`: storage, or the way to it, is away; it says nothing of what is stored.
#: `gone`: what was looked for is not there, or no longer.
#: `damage`: the bytes are lost, or something else stands in the place of a file.
#: `full`: no space or quota is left.
#: `refused`: this user, or this mount, may not do it.
#: `not supported`: this file system cannot do it.
#: `scarce`: this process or node has run out of descriptors or memory.
#: `unexpected`: all other numbers.
Kind = Literal[
    "transient", "gone", "damage", "full", "refused", "not supported", "scarce", "unexpected"
]


class ErrorClass(NamedTuple):
    """What one error number means."""

    kind: Kind
    remedy: str
    may_pass: bool = False
    """Storage may do a moment later what it has refused. If it does not, `kind` counts."""


_AWAY = ErrorClass(
    "transient",
    "storage is away: look at the file system's servers and at this node's mount, then try again",
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
#: Of all numbers that the table does not have.
DEFAULT = ErrorClass(
    "unexpected",
    "no file system should answer that: look at the kernel's log (dmesg), at the file system's "
    "servers and at this node's mount",
)

#: What network file systems report while a server, or the way to it, is away for a moment. NFS
#: and Lustre add EIO (a soft mount, an eviction) and ESTALE (a handle that another host replaced),
#: which also have another meaning if they last.
TABLE: dict[int, ErrorClass] = {
    errno.EAGAIN: _BUSY,
    errno.EINTR: _BUSY,
    errno.EBUSY: _BUSY,
    errno.ENOLCK: _BUSY,
    errno.ETIMEDOUT: _AWAY,
    errno.ENOTCONN: _AWAY,
    errno.ESHUTDOWN: _AWAY,
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
    errno.ENOENT: ErrorClass("gone", "find out what removed it"),
    errno.ESTALE: ErrorClass(
        "gone",
        "the server lost track of it: find out what removed or replaced it, or mount the file "
        "system again",
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
        "raise the file size limit (ulimit -f) of whoever starts the job, or save where files may "
        "be as large",
    ),
    errno.EROFS: ErrorClass(
        "refused", "the file system is read-only: remount it or save elsewhere"
    ),
    errno.EACCES: ErrorClass("refused", _PERMISSION),
    errno.EPERM: ErrorClass(
        "refused",
        f"{_PERMISSION}; if it has that, the file system refuses the operation: save elsewhere",
    ),
    errno.ENAMETOOLONG: ErrorClass("refused", "save to a directory with a shorter path"),
    errno.EINVAL: _UNSUPPORTED,
    errno.ENOSYS: _UNSUPPORTED,
    errno.EOPNOTSUPP: _UNSUPPORTED,
    errno.ENOTTY: _UNSUPPORTED,
    errno.EXDEV: _UNSUPPORTED,
    errno.EMFILE: ErrorClass(
        "scarce", "raise the limit on open files (ulimit -n) of whoever starts the job"
    ),
    errno.ENFILE: ErrorClass(
        "scarce", "the machine has too many open files: end what holds them (lsof shows)"
    ),
    errno.ENOBUFS: ErrorClass("scarce", "free memory on this node"),
    errno.ENOMEM: ErrorClass("scarce", "free memory on this node"),
}


def class_of(error: BaseException | int | None) -> ErrorClass:
    """Return the class of an error, or of an error number; `DEFAULT` if the table has none."""
    number = error.errno if isinstance(error, OSError) else error
    return TABLE.get(number, DEFAULT) if isinstance(number, int) else DEFAULT


def may_pass(error: BaseException) -> bool:
    """Return whether storage may do a moment later what it has just refused with `error`."""
    return class_of(error).may_pass


def is_unsupported(error: BaseException) -> bool:
    """Return whether `error` says that the file system cannot do what was asked."""
    return class_of(error).kind == "not supported"


def is_scarce(error: BaseException) -> bool:
    """Return whether `error` says that this process or node has run out of something."""
    return class_of(error).kind == "scarce"


def will_last(error: BaseException) -> bool:
    """Return whether only a person can end what `error` reports."""
    return class_of(error).kind in ("full", "refused", "not supported")
