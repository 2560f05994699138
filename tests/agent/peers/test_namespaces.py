"""Nodes with their own network namespaces: agents reach each other only through a wire."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import cluster
from tests.support.trainer import eventually

_CLONE_NEWNET = 0x40000000
HOSTS = ["10.231.77.1", "10.231.77.2"]


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces with a wire between them."""
    names = [f"flashckpt-{os.getpid()}-{n}" for n in range(2)]
    wire = [f"fck{os.getpid()}{side}" for side in "ab"]
    made: list[str] = []
    try:
        for name in names:
            ip(f"netns add {name}")
            made.append(name)
        ip(f"link add {wire[0]} netns {names[0]} type veth peer name {wire[1]} netns {names[1]}")
        for name, side, host in zip(names, wire, HOSTS, strict=True):
            ip(f"-n {name} address add {host}/24 dev {side}")
            ip(f"-n {name} link set {side} up")
        yield names
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine refuses network namespaces: {error}")
    finally:
        for name in made:
            ip(f"netns delete {name}")


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Give this thread, and every process that it starts, the network of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{name}") as there:
        assert libc.setns(there.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(before.fileno(), _CLONE_NEWNET) == 0


def test_a_cut_wire_costs_a_warning_and_no_save(tmp_path: Path, namespaces: list[str]) -> None:
    with cluster(tmp_path, (1, 1)) as made:
        made.hosts = HOSTS
        made.inside = lambda node: inside(namespaces[node])
        made.start("copy", timeout_s=0.5)
        for number, node in enumerate(made.nodes):
            (pid,) = node.agents()
            network = os.stat(f"/proc/{pid}/ns/net").st_ino
            assert network == os.stat(f"/run/netns/{namespaces[number]}").st_ino
        made.stage(10)
        made.await_held(10, 1)
        end = f"fck{os.getpid()}a"
        ip(f"-n {namespaces[0]} link set {end} down")
        made.stage(20)
        assert [made.trainers[rank].outcome().error for rank in (0, 1)] == [None, None]
        assert [made.trainers[rank].outcome().error for rank in (0, 1)] == [None, None]
        eventually("a warning", lambda: "iteration 20 is not held by node 1" in made.log(0))
        ip(f"-n {namespaces[0]} link set {end} up")
        made.await_held(20, 1)
