"""Forked children, such as the workers of a DataLoader: they keep neither slab nor connection.

A kept slab would occupy memory after its replacement. A kept connection would hide the end of the
trainer from the agent.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt import exit_status, forks
from megatron_flashckpt.config import Config
from megatron_flashckpt.memory import slab as slab_module
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import PAGE
from megatron_flashckpt.save import session as session_module
from megatron_flashckpt.save.session import Session
from megatron_flashckpt.save.step_hook import StepHook
from tests.support.processes import slabs_of, sockets_of
from tests.support.rank_job import Job, session_of
from tests.support.trainer import PATIENCE_S


def in_child(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a forked child; the result must fit into a pipe as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    return json.loads(output)


def test_a_child_keeps_neither_slab_nor_connection(job: Job, root: Path) -> None:
    assert job.save(1) is None
    client, slab = job.checkpointer.link.current, job.checkpointer.link._slab
    socket = os.readlink(f"/proc/self/fd/{client._sock.fileno()}")
    inode = os.fstat(slab.fd).st_ino

    def kept() -> list[int | str]:
        """Return the descriptors and mappings that tie this process to its node."""
        of_slab = [number for number in slabs_of("self") if number == inode]
        return [*of_slab, *(link for link in sockets_of("self") if link == socket)]

    assert len(kept()) == 3, "descriptor, mapping, socket"
    assert in_child(kept) == []
    assert len(kept()) == 3
    assert job.save(2) is None
    job.assert_stored(root, 2)


def test_a_child_keeps_objects_that_reuse_a_slab_descriptor_or_address() -> None:
    slab = Slab.create(1, 0, PAGE, "0")
    number = slab.fd
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(slab.memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p

    def reuse() -> list[bool]:
        os.dup2(os.open(os.devnull, os.O_RDONLY), number)
        libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(PAGE),
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000,  # MAP_FIXED_NOREPLACE
            -1,
            ctypes.c_long(0),
        )
        nonlocal slab
        slab.close()
        del slab
        gc.collect()
        mapped = f"{address:x}-" in Path("/proc/self/maps").read_text()
        return [mapped, os.readlink(f"/proc/self/fd/{number}") == os.devnull]

    assert in_child(reuse) == [True, True]
    assert bytes(slab.memory[:8]) == b"FLASHSLB"
    slab.close()


def test_a_child_does_not_inherit_a_slab_that_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A background thread makes slabs while data loaders start their workers."""
    kept: list[bool] = []

    def allocate(fd: int, *_: Any, **__: Any) -> None:
        inode = os.fstat(fd).st_ino
        kept.append(inode in slabs_of("self"))
        kept.append(in_child(lambda: inode in slabs_of("self")))

    monkeypatch.setattr(slab_module, "allocate", allocate)
    Slab.create(1, 0, PAGE, "0").close()
    assert kept == [True, False]


def test_a_fork_waits_until_a_descriptor_is_registered() -> None:
    about_to_fork, registered = threading.Event(), []
    seen: list[list[str]] = []

    def fork() -> None:
        about_to_fork.set()
        seen.append(in_child(lambda: registered))

    thread = threading.Thread(target=fork)
    with forks.forks_blocked():
        thread.start()
        assert about_to_fork.wait(PATIENCE_S)
        for _ in range(1000):
            os.sched_yield()
        registered.append("by now")
    thread.join(PATIENCE_S)
    assert seen == [["by now"]]


@pytest.fixture
def session(job: Job, monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session of this process with one checkpointer, set up as for the launcher."""
    made, _ = session_of(job, Config())
    monkeypatch.setattr(session_module, "session", made)
    return made


def test_a_child_may_step_while_its_parent_still_copies() -> None:
    """The child lacks the copy thread that an optimizer would wait for."""
    waits: list[str] = []
    hook = StepHook(lambda: waits.append("waited"))

    def step() -> list[str]:
        hook._wait()
        return waits

    assert in_child(step) == []
    assert step() == ["waited"]


def test_a_child_may_train_and_save_independently(
    job: Job, session: Session, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that forks may have imported this package before."""
    assert job.save(1) is None
    monkeypatch.setattr(session_module, "get_args", lambda: None)
    monkeypatch.setattr(session_module.announcements, "ask_for_memory_saves", lambda *_: None)

    def own() -> list[bool]:
        made = session.checkpointer(str(root))
        return [made is not job.checkpointer, len(session._open) == 1]

    assert in_child(own) == [True, True]
    assert session._open[str(root)].checkpointer is job.checkpointer


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("how", ["Ctrl-C", "a handler of SIGTERM"])
def test_an_interrupted_exit_handler_ends_with_an_error_status(
    monkeypatch: pytest.MonkeyPatch, tells: bool, how: str
) -> None:
    """Python ignores exceptions of exit handlers and exits with status 0."""
    config = Config(exit_nonzero_unless_durable=tells)

    def interrupted(**_: object) -> None:
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        sys.exit(143)

    child = os.fork()
    if child == 0:
        try:
            exit_status.watch()
            session = Session(config)
            monkeypatch.setattr(session, "finalize", interrupted)
            session.at_exit()
        finally:
            os._exit(0)  # as Python does after its handlers
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(tells)
