"""The library does what its rules say, and Python's file calls go through it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faulty_storage.preload import (
    FaultyStorage,
    append_only,
    calm,
    fail,
    late,
    no_fallocate,
    sometimes,
    sometimes_late,
)
from tests.support.trainer import eventually

#: Each does with files what the package does, and says how it went; run in one process.
PRELUDE = """
import errno, json, os, sys
from megatron_flashckpt.storage.fallocate import fallocate
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
#: By call: what Python does that must go through it. `file` holds 8192 bytes, `dir` is empty.
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


def tell(faulty: FaultyStorage, root: Path, *lines: str) -> dict[str, object]:
    """Run the lines under the library; return what became of each, by its text."""
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


def test_every_way_in_which_python_does_it_is_refused(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    root, rules = tmp_path / "save", tmp_path / "faults"
    lines = []
    for call, ways in WAYS.items():
        # As `FaultyStorage.rule` does it, in the process that is concerned.
        lines.append(f"open({f'{rules}.{call}'!r}, 'w').write({f'root {root}' + chr(10)!r} +")
        lines.append(f"    {fail(call, errno.EUCLEAN)!r})")
        lines.append(f"os.replace({f'{rules}.{call}'!r}, {str(rules)!r})")
        lines += [f"attempt({way!r}, lambda: {way})" for way in ways]
    told = tell(faulty, root, *lines)
    assert told == {way: "EUCLEAN" for ways in WAYS.values() for way in ways}
    assert {(hit.call, hit.number) for hit in faulty.hits()} == {
        (call, errno.EUCLEAN) for call in WAYS
    }
    assert (root / "file").read_bytes() == bytes(8192), "nothing was done"
    assert sorted(path.name for path in root.iterdir()) == ["dir", "file"]


def test_only_paths_below_the_root_that_contain_the_part_are_concerned(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    (tmp_path / "save" / "other").touch()
    (tmp_path / "save2").touch()
    faulty.rule(fail("stat", errno.EIO, "/file"))
    told = tell(
        faulty,
        tmp_path / "save",
        *(
            f"attempt({n!r}, lambda: os.stat(at({n!r})) and 1)"
            for n in ("file", "other", "../save2")
        ),
    )
    assert told == {"file": "EIO", "other": 1, "../save2": 1}


def test_a_rule_begins_after_some_calls_and_ends_after_some(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    faulty.rule(fail("stat", errno.ESTALE, "file", skip=2, times=3))
    stats = [f"attempt('{n}', lambda: os.stat(at('file')) and 1)" for n in range(7)]
    told = tell(faulty, tmp_path / "save", *stats)
    assert list(told.values()) == [1, 1, "ESTALE", "ESTALE", "ESTALE", 1, 1]


def test_rules_that_change_count_at_once_and_from_the_start(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    root = tmp_path / "save"
    faulty.rule(fail("stat", errno.EIO, "file", times=1))
    again = f"open({str(tmp_path / 'faults')!r}).read().replace(' 5 ', ' 13 ')"
    told = tell(
        faulty,
        root,
        *(f"attempt('{n}', lambda: os.stat(at('file')) and 1)" for n in "ab"),
        f"new = {again}",
        f"open({str(tmp_path / 'next')!r}, 'w').write(new)",
        f"os.replace({str(tmp_path / 'next')!r}, {str(tmp_path / 'faults')!r})",
        *(f"attempt('{n}', lambda: os.stat(at('file')) and 1)" for n in "cd"),
    )
    assert told == {"a": "EIO", "b": 1, "c": "EACCES", "d": 1}


def test_what_is_done_can_be_reported_as_an_error(faulty: FaultyStorage, tmp_path: Path) -> None:
    faulty.rule(fail("rename", errno.ETIMEDOUT, done=True))
    told = tell(faulty, tmp_path / "save", "attempt('it', lambda: os.rename(at('file'), at('to')))")
    assert told == {"it": "ETIMEDOUT"}
    assert (tmp_path / "save" / "to").exists()


def test_a_close_that_fails_has_closed(faulty: FaultyStorage, tmp_path: Path) -> None:
    faulty.rule(fail("close", errno.EDQUOT))
    told = tell(
        faulty,
        tmp_path / "save",
        "file = fd('file')",
        "attempt('close', lambda: os.close(file))",
        "attempt('after', lambda: os.fstat(file))",
    )
    assert told == {"close": "EDQUOT", "after": "EBADF"}


def test_writes_at_the_end_only(faulty: FaultyStorage, tmp_path: Path) -> None:
    faulty.rule(append_only(), no_fallocate())
    told = tell(
        faulty,
        tmp_path / "save",
        "attempt('end', lambda: closing(fd('file'), lambda f: os.pwrite(f, b'x', 8192)))",
        "attempt('start', lambda: closing(fd('file'), lambda f: os.pwrite(f, b'x', 0)))",
        "attempt('reserve', lambda: closing(fd('file'), lambda f: fallocate(f, 9000)))",
    )
    assert told == {"end": 1, "start": "EINVAL", "reserve": errno.errorcode[errno.EOPNOTSUPP]}


@pytest.mark.parametrize(
    "made", ["open(at('new'), 'w').close()", "os.rename(at('file'), at('new'))"]
)
def test_other_processes_see_new_names_late_and_their_maker_at_once(
    faulty: FaultyStorage, tmp_path: Path, made: str
) -> None:
    root = tmp_path / "save"
    faulty.rule(late(3_600_000, "new"))
    looks = (
        "attempt('stat', lambda: os.stat(at('new')) and 1)",
        "attempt('open', lambda: open(at('new'), 'rb').read() is not None)",
        "attempt('list', lambda: 'new' in os.listdir(root))",
    )
    assert tell(faulty, root, made, *looks) == {"stat": 1, "open": True, "list": True}
    assert tell(faulty, root, *looks) == {"stat": "ENOENT", "open": "ENOENT", "list": False}
    assert (root / "new").exists(), "it is there for whoever is not under the library"
    faulty.rule(late(200, "new"))

    def seen() -> bool:
        return tell(faulty, root, *looks) == {"stat": 1, "open": True, "list": True}

    eventually("other processes see it", seen, within_s=60.0)


def test_a_name_that_replaces_another_is_seen_at_once(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    root = tmp_path / "save"
    faulty.rule(late(3_600_000))
    tell(faulty, root, "open(at('new'), 'w').write('2')", "os.replace(at('new'), at('file'))")
    assert tell(faulty, root, "attempt('it', lambda: open(at('file')).read())") == {"it": "2"}


def test_a_process_that_was_told_of_a_name_sees_it(faulty: FaultyStorage, tmp_path: Path) -> None:
    root = tmp_path / "save"
    faulty.rule(late(3_600_000))
    tell(faulty, root, "os.mkdir(at('one'))", "os.mkdir(at('other'))", "os.mkdir(at('third'))")
    told = tell(
        faulty,
        root,
        "attempt('mkdir', lambda: os.mkdir(at('one')))",
        "open(at('other/file'), 'w').close()",
        *(f"attempt({n!r}, lambda: os.stat(at({n!r})) and 1)" for n in ("one", "other", "third")),
    )
    assert told == {"mkdir": "EEXIST", "one": 1, "other": 1, "third": "ENOENT"}


# ---------------------------------------------------------------------- faults by a seed

#: Looks at six files 50 times each; results are the numbers of the looks that were refused.
LOOKS = """
results.append(["refused", []])
for look in range(300):
    try: os.stat(at(f"rank_{look % 6}-0123456789ab.bin"))
    except OSError as error:
        if error.errno != errno.ENOENT: results[0][1].append((look, error.errno))
"""


def refused_looks(faulty: FaultyStorage, root: Path, looks: str = LOOKS) -> list[list[int]]:
    found = tell(faulty, root, looks)["refused"]
    assert isinstance(found, list)
    return found


def test_a_seed_refuses_the_same_calls_again_and_another_seed_others(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    root = tmp_path / "save"

    def refused(seed: int, looks: str = LOOKS) -> list[list[int]]:
        faulty.rule(sometimes("stat", 1000, seed, [errno.EIO, errno.ESTALE], "rank"))
        return refused_looks(faulty, root, looks)

    first = refused(1)
    assert 15 < len(first) < 50, "about one in ten"
    assert {number for _, number in first} == {errno.EIO, errno.ESTALE}
    # Names of other saves differ in their ids only.
    assert refused(1, LOOKS.replace("0123456789ab", "ba9876543210")) == first
    assert refused(2) != first


def test_a_process_meets_no_more_errors_than_it_is_to_within_a_time(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    always = sometimes("stat", 10_000, 1, [errno.EIO])
    faulty.rule(calm(2, 3_600_000), always)
    assert [look for look, _ in refused_looks(faulty, tmp_path / "save")] == [0, 1]
    faulty.rule(calm(2, 0), always)
    assert len(refused_looks(faulty, tmp_path / "save")) == 300


def test_what_a_seed_refuses_may_be_done_all_the_same(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    faulty.rule(sometimes("rename", 10_000, 1, [errno.ETIMEDOUT], done=True))
    told = tell(faulty, tmp_path / "save", "attempt('it', lambda: os.rename(at('file'), at('to')))")
    assert told == {"it": "ETIMEDOUT"}
    assert (tmp_path / "save" / "to").exists()


def test_a_seed_refuses_the_close_of_what_may_have_been_written_only(
    faulty: FaultyStorage, tmp_path: Path
) -> None:
    faulty.rule(sometimes("close", 10_000, 1, [errno.EIO]))
    told = tell(
        faulty,
        tmp_path / "save",
        "attempt('read', lambda: os.close(fd('file', os.O_RDONLY)))",
        "attempt('written', lambda: os.close(fd('file', os.O_WRONLY)))",
    )
    assert told == {"read": None, "written": "EIO"}


def test_names_come_late_by_as_much_as_a_seed_says(faulty: FaultyStorage, tmp_path: Path) -> None:
    root = tmp_path / "save"
    faulty.rule(sometimes_late(3_600_000, 1, "new"))
    tell(faulty, root, *(f"open(at('new{n}'), 'w').close()" for n in range(20)))
    shown = "results.append(['seen', len([n for n in os.listdir(root) if 'new' in n])])"
    assert tell(faulty, root, shown) == {"seen": 0}
    faulty.rule(sometimes_late(1000, 1, "new"))
    eventually("all are seen", lambda: tell(faulty, root, shown) == {"seen": 20}, within_s=60.0)
