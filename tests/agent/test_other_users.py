"""Protection from other users: files of the agent are private, and its inputs cannot run code."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_flashckpt
from megatron_flashckpt.agent.place import Place
from tests.agent.conftest import Node
from tests.agent.test_places import NOBODY, as_root
from tests.support.histories import saves_in
from tests.support.trainer import FakeTrainer, eventually

#: A script that tries all accesses to the given paths, and prints those that succeed.
INTRUDER = """
import os, socket, sys
from megatron_flashckpt.agent import frames, protocol as p
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
directory, name, pid = sys.argv[1:]
def attempt(what, action):
    try:
        action()
    except OSError:
        return
    print(what)
def connect():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect("\\0" + name)
        frames.send(sock, p.Hello(0, p.PROTOCOL_VERSION))
        if not sock.recv(1):
            raise OSError("hung up")
attempt("list", lambda: os.listdir(directory))
attempt("socket", connect)
log = directory + "/agent-" + name.split("-", 3)[3] + ".log"
attempt("log", lambda: open(log).close())
attempt("remove the log", lambda: os.unlink(log))
attempt("plant", lambda: open(directory + "/x", "w").close())
attempt("memory", lambda: open("/proc/%s/mem" % pid, "rb").close())
for fd in range(64):  # the slabs are among them
    attempt("descriptor %d" % fd, lambda: open("/proc/%s/fd/%d" % (pid, fd), "rb").close())
print("done")
"""


def intrude(place: Place, pid: int) -> list[str]:
    script = INTRUDER.format(nobody=NOBODY)
    done = subprocess.run(
        [sys.executable, "-c", script, str(place.log.parent), str(place)[1:], str(pid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    *could, last = done.stdout.split("\n")[:-1] or [""]
    assert last == "done", done.stderr
    return could


@pytest.fixture
def trainer(node: Node, root: Path) -> FakeTrainer:
    made = node.trainer(root)
    assert made.save(1).error is None
    return made


def open_up(path: Path) -> None:
    """Let other users reach `path`."""
    while path != Path("/tmp"):
        path.chmod(path.stat().st_mode | 0o055)
        path = path.parent


@as_root
def test_another_user_reaches_neither_socket_slab_nor_log(
    node: Node, root: Path, trainer: FakeTrainer
) -> None:
    """The intruder connects, as to every abstract name, and is hung up on."""
    # Only the directory of the logs blocks other users.
    open_up(node.runtime_dir.parent)
    place = node.place(root)
    assert place.log.exists()
    assert intrude(place, trainer.client.agent_pid) == []
    eventually("the log line", lambda: f"user {NOBODY} is another user" in place.log.read_text())
    assert trainer.save(2).error is None


@pytest.mark.parametrize(
    ("umask", "file", "directory", "group"),
    [
        (0o027, 0o640, 0o750, None),
        pytest.param(0o002, 0o664, 0o2775, 12345, marks=as_root, id="shared by a group"),
    ],
)
def test_files_get_the_modes_that_the_umask_leaves_and_the_group_of_their_directory(
    node: Node, root: Path, umask: int, file: int, directory: int, group: int | None
) -> None:
    former = os.umask(umask)
    try:
        root.mkdir()
        if group is not None:
            try:
                os.chown(root, -1, group)
            except OSError as error:
                pytest.skip(f"this machine refuses groups: {error}")
            root.chmod(directory)
        trainer = node.trainer(root)  # the agent inherits this umask
        trainer.open_run()
        assert trainer.save(1).error is None
    finally:
        os.umask(former)
    eventually("the history", lambda: saves_in(root))
    eventually("the removal of commit records", lambda: not list(root.rglob("*.record")))
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        assert stat.S_IMODE(status.st_mode) == (directory if path.is_dir() else file), path
        assert group in (None, status.st_gid), path
    for path in (node.runtime_dir, node.log(root)):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_only_converters_and_collectives_use_pickle() -> None:
    """Messages, records and manifests are typed data; only converters read pickles, restricted.

    Ranks of one job also read pickles of each other, as in the object collectives of
    `torch.distributed` that Megatron itself calls.
    """
    home = Path(megatron_flashckpt.__file__).parent
    runs_code = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    users = set()
    for path in home.rglob("*.py"):
        for at in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(at, ast.Import):
                names = [alias.name for alias in at.names]
            elif isinstance(at, ast.ImportFrom):
                names = [at.module or ""]
            if runs_code & {name.split(".")[0] for name in names}:
                users.add(str(path.relative_to(home)))
    among_ranks = {"collectives.py"}
    assert all(name.startswith("convert/") for name in users - among_ranks), users
    assert users > among_ranks, "the test searches the wrong directory"
