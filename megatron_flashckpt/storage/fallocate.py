"""The system call fallocate(2).

`posix_fallocate` of glibc emulates the call where the file system refuses it: it writes one byte
per block, 65,538 writes for a file of 256 MiB. NFS before 4.2, CephFS and many FUSE file systems
refuse.
"""

from __future__ import annotations

import ctypes
import errno
import os

_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


def fallocate(fd: int, nbytes: int) -> None:
    """Reserve the first `nbytes` bytes of the file `fd`, and extend the file to that size.

    Raises:
        OSError: EOPNOTSUPP where the file system cannot reserve space; ENOSPC, EDQUOT if there is
            not enough of it.
    """
    if nbytes <= 0:
        return  # the system call refuses such a length
    if _fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(fd, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
