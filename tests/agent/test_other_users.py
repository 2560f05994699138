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
from megatron_flashckpt.file_format.file_names import iteration_dir
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, eventually

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

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


@needs_root
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
    ("umask", "file", "directory"), [(0o077, 0o600, 0o700), (0o027, 0o640, 0o750)]
)
def test_files_get_the_modes_that_the_umask_leaves(
    node: Node, root: Path, umask: int, file: int, directory: int
) -> None:
    former = os.umask(umask)
    try:
        assert node.trainer(root).save(1).error is None
    finally:
        os.umask(former)
    eventually("the removal of commit records", lambda: not list(root.rglob("*.commit")))
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [root, *root.rglob("*")]}
    for path, mode in modes.items():
        assert mode == (directory if path.is_dir() else file), path
    assert len(modes) == 7
    for path in (node.runtime_dir, node.log(root)):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((root / iteration_dir(1)).stat().st_mode) == directory


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
