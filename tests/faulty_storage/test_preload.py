"""Rules of the preloaded library, which intercepts all file calls of Python."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faulty_storage.preload import FaultyStorage, fail, late, sometimes
from tests.support.trainer import eventually

#: Beginning of a program whose lines make the package's file calls and record their results.
PRELUDE = """
import errno, json, os, sys
from megatron_flashckpt.storage.posix_files import fallocate
root, results = sys.argv[1], []

def attempt(name, work):
    try:
        value = work()
        results.append([name, value if isinstance(value, (int, str, list, bool)) else None])
    except OSError as error:
        results.append([name, errno.errorcode[error.errno]])

def at(name): return os.path.join(root, name)
def fd(name, flags=os.O_RDWR): return os.open(at(name), flags)
def closing(file, work):
    try: return work(file)
    finally:
        try: os.close(file)
        except OSError: pass
"""
#: Python's ways to make each call. `file` holds 8192 bytes, `dir` is empty.
WAYS = {
    "open": ["os.open(at('file'), os.O_RDONLY)", "open(at('file'), 'rb').close()",
             "os.open('file', os.O_RDONLY, dir_fd=os.open('/proc/self/cwd', os.O_RDONLY))"],
    "read": ["closing(fd('file'), lambda f: os.read(f, 1))",
             "closing(fd('file'), lambda f: os.pread(f, 1, 0))",
             "closing(fd('file'), lambda f: os.preadv(f, [bytearray(4)], 0))",
             "open(at('file'), 'rb').read()", "open(at('file'), 'rb', buffering=0).read(1)"],
    "write": ["closing(fd('file'), lambda f: os.write(f, b'x'))",
              "closing(fd('file'), lambda f: os.pwrite(f, b'x', 0))",
              "closing(fd('file'), lambda f: os.pwritev(f, [b'x'], 0))",
              "open(at('file'), 'r+b', buffering=0).write(b'x')"],
    "fsync": ["closing(fd('file'), os.fsync)", "closing(fd('file'), os.fdatasync)",
              "closing(fd('', os.O_RDONLY), os.fsync)"],
    "close": ["os.close(fd('file'))", "open(at('file'), 'rb').close()"],
    "rename": ["os.replace(at('file'), at('to'))", "os.rename(at('file'), at('to'))"],
    "link": ["os.link(at('file'), at('to'))"],
    "unlink": ["os.unlink(at('file'))", "__import__('pathlib').Path(at('file')).unlink()"],
    "mkdir": ["os.mkdir(at('to'))", "__import__('pathlib').Path(at('to')).mkdir()"],
    "rmdir": ["os.rmdir(at('dir'))"],
    "list": ["os.listdir(root)", "list(os.scandir(root))",
             "os.listdir(os.open(root, os.O_RDONLY))"],
    "stat": ["os.stat(at('file'))", "os.lstat(at('file'))", "os.fstat(fd('file'))",
             "os.stat('file', dir_fd=os.open(root, os.O_RDONLY), follow_symlinks=False)"],
    "fallocate": ["closing(fd('file'), lambda f: fallocate(f, 9000))"],
    "truncate": ["closing(fd('file'), lambda f: os.ftruncate(f, 5))"],
}  # fmt: skip


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyStorage:
    root = tmp_path / "save"
    (root / "dir").mkdir(parents=True)
    (root / "file").write_bytes(bytes(8192))
    return FaultyStorage(root, tmp_path)


def run_lines(faulty: FaultyStorage, root: Path, *lines: str) -> dict[str, object]:
    """Run the lines under the library; return the result of each attempt by its name."""
    script = "\n".join([PRELUDE, *lines, "sys.stdout.write(json.dumps(results))"])
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(root)],
        env={**faulty.environment, "PYTHONPATH": ":".join(filter(None, sys.path))},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_rule_meets_every_way_in_which_python_makes_a_call(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    root, rules = tmp_path / "save", tmp_path / "faults"
    lines = []
    for call, ways in WAYS.items():
        # The process itself replaces the rules, as `FaultyStorage.rule` does.
        lines.append(f"open({f'{rules}.{call}'!r}, 'w').write({f'root {root}' + chr(10)!r} +")
        lines.append(f"    {fail(call, errno.EUCLEAN)!r})")
        lines.append(f"os.replace({f'{rules}.{call}'!r}, {str(rules)!r})")
        lines += [f"attempt({way!r}, lambda: {way})" for way in ways]
    results = run_lines(faulty, root, *lines)
    assert results == {way: "EUCLEAN" for ways in WAYS.values() for way in ways}
    assert {(hit.call, hit.number) for hit in faulty.hits()} == {
        (call, errno.EUCLEAN) for call in WAYS
    }
    assert (root / "file").read_bytes() == bytes(8192), "no call took effect"
    assert sorted(path.name for path in root.iterdir()) == ["dir", "file"]


def test_a_rule_meets_only_paths_below_the_root_with_its_part(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    (tmp_path / "save" / "other").touch()
    (tmp_path / "save2").touch()
    faulty.rule(fail("stat", errno.EIO, "/file"))
    results = run_lines(
        faulty,
        tmp_path / "save",
        *(
            f"attempt({n!r}, lambda: os.stat(at({n!r})) and 1)"
            for n in ("file", "other", "../save2")
        ),
    )
    assert results == {"file": "EIO", "other": 1, "../save2": 1}


def test_a_failed_call_may_have_taken_effect(faulty: FaultyStorage, tmp_path: Path) -> None:
    faulty.rule(fail("rename", errno.ETIMEDOUT, done=True), fail("close", errno.EDQUOT))
    results = run_lines(
        faulty,
        tmp_path / "save",
        "file = fd('file')",
        "attempt('close', lambda: os.close(file))",
        "attempt('after', lambda: os.fstat(file))",
        "attempt('rename', lambda: os.rename(at('file'), at('to')))",
    )
    assert results == {"close": "EDQUOT", "after": "EBADF", "rename": "ETIMEDOUT"}
    assert (tmp_path / "save" / "to").exists()


def test_only_other_processes_see_a_new_name_late(faulty: FaultyStorage, tmp_path: Path) -> None:
    root = tmp_path / "save"
    faulty.rule(late(3_600_000, "new"))
    looks = (
        "attempt('stat', lambda: os.stat(at('new')) and 1)",
        "attempt('open', lambda: open(at('new'), 'rb').read() is not None)",
        "attempt('list', lambda: 'new' in os.listdir(root))",
    )
    made = "os.rename(at('file'), at('new'))"
    assert run_lines(faulty, root, made, *looks) == {"stat": 1, "open": True, "list": True}
    assert run_lines(faulty, root, *looks) == {"stat": "ENOENT", "open": "ENOENT", "list": False}
    assert (root / "new").exists(), "processes without the library see the name"
    faulty.rule(late(200, "new"))

    def seen() -> bool:
        return run_lines(faulty, root, *looks) == {"stat": 1, "open": True, "list": True}

    eventually("other processes see it", seen, within_s=60.0)


# ---------------------------------------------------------------------- faults by a seed

#: Lines that stat six files 50 times each, and record the numbers of the failed calls.
LOOKS = """
results.append(["refused", []])
for look in range(300):
    try: os.stat(at(f"rank_{look % 6}-0123456789ab.bin"))
    except OSError as error:
        if error.errno != errno.ENOENT: results[0][1].append((look, error.errno))
"""


def refused_looks(faulty: FaultyStorage, root: Path, looks: str = LOOKS) -> list[list[int]]:
    refused = run_lines(faulty, root, looks)["refused"]
    assert isinstance(refused, list)
    return refused


def test_a_seed_repeats_its_failures_and_another_seed_has_others(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    root = tmp_path / "save"

    def refused(seed: int, looks: str = LOOKS) -> list[list[int]]:
        faulty.rule(sometimes("stat", 1000, seed, [errno.EIO, errno.ESTALE], "rank"))
        return refused_looks(faulty, root, looks)

    first = refused(1)
    assert 15 < len(first) < 50, "about one call in ten fails"
    assert {number for _, number in first} == {errno.EIO, errno.ESTALE}
    # File names of other saves differ only in their ids.
    assert refused(1, LOOKS.replace("0123456789ab", "ba9876543210")) == first
    assert refused(2) != first
