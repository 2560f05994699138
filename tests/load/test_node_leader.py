"""Reads by one rank per node for all its ranks; after any failure each rank reads by itself."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megatron_flashckpt.agent.frames import Peer
from megatron_flashckpt.load import node_leader
from tests.support.trainer import eventually, is_alive

PROGRAM = Path(__file__).with_name("node_rank.py")
#: A busy machine takes long to start a few processes.
SOON_S = 120.0


def variables(local_rank: int, ranks: int = 4, **changes: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    return {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_x/none_y/attempt_0/{local_rank}/error.json",
        **changes,
    }


class Node:
    """A node whose ranks are processes."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, local_rank: int, *options: str, ranks: int = 4, **changes: str) -> Future[str]:
        """Start a rank; return a future of its first output line."""
        environment = {**os.environ, **variables(local_rank, ranks, **changes)}
        arguments = ["--reads", str(self.where / "reads"), *options]
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        line: Future[str] = Future()
        assert process.stdout is not None
        reader = process.stdout

        def follow() -> None:
            with contextlib.suppress(ValueError):  # the test is over
                line.set_result(reader.readline().strip())

        threading.Thread(target=follow, daemon=True).start()
        return line

    def readers(self) -> list[int]:
        file = self.where / "reads"
        return sorted(map(int, file.read_text().split())) if file.exists() else []

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    child.kill()
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    try:
        yield started
    finally:
        started.end()


def printed(lines: list[Future[str]]) -> list[str]:
    return [line.result(SOON_S) for line in lines]


def test_one_rank_reads_in_any_start_order_and_again_after_a_restart(node: Node) -> None:
    """torchrun counts a restart only on nodes where a rank has failed."""
    before = [node.start(rank, "--content", "before", "--stay") for rank in (0, 1)]
    assert printed(before) == ["before"] * 2  # the leader still waits for two ranks
    node.end()
    after = [node.start(rank, "--content", "after", "--stay") for rank in (3, 2, 1, 0)]
    assert printed(after) == ["after"] * 4
    assert node.readers() == [0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"TORCHELASTIC_RUN_ID": "another"},
        {"MASTER_ADDR": "elsewhere"},
        {"MASTER_PORT": "29501"},
        {"GROUP_RANK": "1"},
        {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_z/attempt_0/1/error.json"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_ranks_of_another_start_or_node_or_job_are_not_answered(change: dict[str, str]) -> None:
    one = node_leader.place_of(variables(0))
    other = node_leader.place_of(variables(1, **change))
    assert one is not None
    assert other is not None
    assert one.key != other.key
    assert one.key == node_leader.place_of(variables(1)).key  # type: ignore[union-attr]


def test_the_others_read_at_once_if_the_reader_is_killed(node: Node) -> None:
    """Their own timeouts are longer than those of this test, and a child of the reader lives on."""
    first = node.start(0, "--content", "", "--in-read", "fork-and-hang")
    child = int(first.result(SOON_S))
    patient = ["--appear-s", "1000", "--answer-s", "1000"]
    lines = [node.start(rank, "--content", f"of {rank}", *patient) for rank in (1, 2, 3)]
    try:
        eventually("all ranks wait", lambda: connections() == 3, SOON_S)
        assert is_alive(child)
        node.processes[0].kill()
        assert printed(lines) == ["of 1", "of 2", "of 3"]
        assert node.readers() == [0, 1, 2, 3]
    finally:
        os.kill(child, signal.SIGKILL)


def test_waiting_ranks_get_their_answer_if_the_reader_then_exits(node: Node) -> None:
    """The reader ends in this way if it refuses the checkpoint."""
    lines = [
        node.start(0, "--content", "of 0", "--in-read", "await"),
        *(node.start(rank, "--content", f"of {rank}") for rank in (1, 2, 3)),
    ]
    eventually("all ranks wait", lambda: connections() == 3, SOON_S)
    (node.where / "go").touch()
    assert printed(lines) == ["of 0"] * 4
    assert node.readers() == [0]


def connections() -> int:
    """Return how many ranks wait on a connection to local rank 0."""
    place = node_leader.place_of(variables(0))
    assert place is not None
    name = "@" + node_leader.socket_name(place, 0, "topic")[1:]
    rows = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    return sum(row.split()[-1] == name for row in rows) - 1  # the listener itself


@pytest.mark.parametrize(
    "changes",
    [
        *({name: None} for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")),
        {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        *({"LOCAL_RANK": rank} for rank in ("4", "-1", "first")),
        {"LOCAL_WORLD_SIZE": ""},
    ],
    ids=str,
)
def test_a_rank_alone_or_without_torchrun_reads_by_itself(changes: dict[str, str | None]) -> None:
    changed = {**variables(1), **changes}
    environ = {name: value for name, value in changed.items() if value is not None}
    assert node_leader.place_of(environ) is None
    assert node_leader.read_once("topic", lambda: b"own", bytes, bytes, environ) == b"own"


# ------------------------------------------------------------------ ranks as threads

_numbers = itertools.count(1000)


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all threads of a test the same call number, so that they act as ranks of one node."""
    monkeypatch.setattr(node_leader, "_calls", itertools.repeat(next(_numbers)))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the socket names to which ranks connect."""
    connected: list[str] = []
    connect = node_leader._connected

    def noting(name: str) -> socket.socket:
        connected.append(name)
        return connect(name)

    monkeypatch.setattr(node_leader, "_connected", noting)
    return connected


def read_in(rank: int, read: Callable[[], bytes], topic: str = "topic", ranks: int = 4) -> bytes:
    return node_leader.read_once(topic, read, bytes, bytes, variables(rank, ranks))


GOOD = node_leader.frame_of(b"of another")


@pytest.fixture
def answered(one_call: None, names: list[str]) -> Iterator[Callable[[bytes | None], bytes]]:
    """A function that returns what a rank reads if another process sends these bytes to it.

    The process ends the connection, unless it sends None.
    """
    with ThreadPoolExecutor() as pool, socket.socket(socket.AF_UNIX) as listener:

        def answer(sent: bytes | None) -> bytes:
            rank = pool.submit(read_in, 1, lambda: b"own")
            if not listener.getsockname():
                listener.bind(eventually("the rank looks for its leader", lambda: names[:1])[0])
                listener.listen()
            other, _ = listener.accept()
            with other:
                if sent is not None:
                    with contextlib.suppress(OSError):  # the rank may have closed it already
                        other.sendall(sent)
                        other.shutdown(socket.SHUT_WR)
                return rank.result(SOON_S)

        yield answer


def test_damaged_and_missing_answers_are_ignored(
    answered: Callable[[bytes | None], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answered(GOOD) == b"of another"
    for place in range(len(GOOD)):
        assert answered(GOOD[:place]) == b"own", f"{place} bytes only"
        changed = bytearray(GOOD)
        changed[place] ^= 1
        assert answered(bytes(changed)) == b"own", f"byte {place} is changed"
    for nbytes in (2**40, 11, 9):
        assert answered(GOOD[:8] + nbytes.to_bytes(8, "little") + GOOD[16:]) == b"own", nbytes
    monkeypatch.setattr(node_leader, "ANSWER_S", 0.2)
    assert answered(None) == b"own"


def test_an_answer_of_another_user_is_ignored(
    answered: Callable[[bytes | None], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_leader, "peer", lambda _: Peer(1, os.getuid() + 1))
    assert answered(GOOD) == b"own"


def test_ranks_read_by_themselves_if_the_socket_name_is_taken(
    answered: Callable[[bytes | None], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_leader, "ANSWER_S", 0.2)
    assert answered(None) == b"own"
    assert read_in(0, lambda: b"first") == b"first"


@pytest.mark.usefixtures("one_call")
def test_another_user_takes_no_rank_s_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose turn was taken waited 60 s in each start."""
    place = node_leader.place_of(variables(0, 2))
    assert place is not None
    users = iter([os.getuid() + 1, os.getuid() + 1, os.getuid()])
    monkeypatch.setattr(node_leader, "peer", lambda _: Peer(1, next(users)))
    assert read_in(0, lambda: b"answer", ranks=2) == b"answer"
    name = node_leader.socket_name(place, next(node_leader._calls), "topic")
    received = []
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(name)
            received.append(b"answer" in other.recv(2**10))
    assert received == [False, False, True]


def test_a_second_call_uses_another_socket_name() -> None:
    """Megatron reads arguments for `--pretrained-checkpoint` first, then for `--load`."""
    seen: list[str] = []

    def noting(name: str) -> bytes:
        seen.append(name)
        raise ConnectionRefusedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_leader, "_receive", noting)
        assert [read_in(1, lambda: b"own"), read_in(1, lambda: b"own")] == [b"own"] * 2
    assert len(set(seen)) == 2


@pytest.mark.usefixtures("one_call")
def test_ranks_with_another_topic_or_decoder_get_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_leader, "APPEAR_S", 0.2)
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(read_in, 0, lambda: b"first", "/one/directory", 3)
        assert leader.result(SOON_S) == b"first"
        assert read_in(1, lambda: b"own", "/another/directory", 2) == b"own"

        def refusing(_: bytes) -> bytes:
            raise ValueError("no such thing")

        environ = variables(1, 3)
        read = node_leader.read_once("/one/directory", lambda: b"own", bytes, refusing, environ)
        assert read == b"own"
        assert read_in(1, lambda: b"own", "/one/directory", 3) == b"first"


@pytest.mark.usefixtures("one_call")
def test_large_answers_arrive_whole_and_the_leader_s_thread_then_ends() -> None:
    large = os.urandom(5 * 2**20)
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(read_in, rank, lambda: large) for rank in (3, 2, 1)]
        assert read_in(0, lambda: large) == large
        assert all(rank.result(SOON_S) == large for rank in ranks)
    eventually(
        "the leader serves no rank",
        lambda: not [t for t in threading.enumerate() if t.name == "flashckpt-node-leader"],
        SOON_S,
    )


@pytest.mark.usefixtures("one_call")
def test_waiting_ranks_read_at_once_if_the_leader_fails(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_leader, "APPEAR_S", 2.0)  # the leader may be faster than the rank
    monkeypatch.setattr(node_leader, "ANSWER_S", 1000.0)

    def fail() -> bytes:
        eventually("the other rank connects", lambda: names, SOON_S)
        raise RuntimeError("this storage is out of order")

    with ThreadPoolExecutor() as pool:
        follower = pool.submit(read_in, 1, lambda: b"own")
        leader = pool.submit(read_in, 0, fail)
        # The error's traceback keeps the leader's objects alive.
        assert isinstance(leader.exception(SOON_S), RuntimeError)
        assert follower.result(SOON_S) == b"own"


@pytest.mark.usefixtures("one_call")
@pytest.mark.parametrize("lacks", ["sockets", "threads"])
def test_a_leader_that_cannot_answer_still_returns_its_own_read(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        if lacks == "sockets":
            raise OSError(errno.EMFILE, "Too many open files")
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if lacks == "sockets":
            patch.setattr(node_leader.socket, "socket", refuse)
        else:
            patch.setattr(node_leader.threading.Thread, "start", refuse)
        assert read_in(0, lambda: b"first", ranks=2) == b"first"
    monkeypatch.setattr(node_leader, "APPEAR_S", 0.2)
    assert read_in(1, lambda: b"own", ranks=2) == b"own"
