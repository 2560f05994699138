"""Damaged files: each gives one clear error with file, fact and remedy, and is not changed.

`verify` and a read report the same error; no damage makes them hang, crash or allocate memory.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    RenamedCheckpointError,
    StorageError,
    for_command,
)
from megatron_flashckpt.file_format.file_names import (
    end_name,
    record_name,
    run_name,
    save_name,
    shard_name,
)
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.checkpoints import SAVE_ID, MadeSave, make, read_all, snapshot

OTHER_SAVE = save_name(run_name(2, "0a1b"), 1)
SHARD_1 = re.escape(shard_name(1, SAVE_ID))
OLDER = r"load an older iteration with --ckpt-step$"


@dataclasses.dataclass(frozen=True)
class Damage:
    """A kind of damage to a checkpoint, and the one error that it must give."""

    apply: Callable[[MadeSave], object]
    message: str
    """Pattern of file, fact and remedy."""
    error: type[FlashCkptError] = CorruptCheckpointError


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def put_in_place_of(file: Path, make_it: Callable[[Path], object]) -> None:
    file.rename(file.with_suffix(".kept"))
    make_it(file)


def shard_of_another_iteration(made: MadeSave) -> bytes:
    return make(made.root.parent / "other", 20, made.save_id).shard(1).read_bytes()


def digest_another_iteration(made: MadeSave) -> None:
    """Use a shard of another save, with a manifest that holds its digests."""
    content = shard_of_another_iteration(made)
    made.forge(1, content[: 8 + int.from_bytes(content[:8], "little")])


def change_item(position: int, value: object) -> Callable[[MadeSave], None]:
    """Change one field of the first item of the template of rank 1."""

    def change(manifest: dict) -> None:
        manifest["templates"][manifest["shards"][1]["template"]][0][position] = value

    return lambda made: made.change_manifest(change)


def change_placement(position: int, value: object) -> Callable[[MadeSave], None]:
    def change(manifest: dict) -> None:
        manifest["shards"][1]["placement"][position] = value

    return lambda made: made.change_manifest(change)


#: The tests of `file_format` and `catalog` have more damages of one file, with their messages.
DAMAGES = {
    "one byte short": Damage(
        lambda made: rewrite(made.shard(1), lambda held: held[:-1]),
        rf"{SHARD_1}: \d+ bytes long, the manifest says \d+; {OLDER}",
    ),
    "a shard of another iteration": Damage(
        lambda made: made.shard(1).write_bytes(shard_of_another_iteration(made)),
        rf"{SHARD_1}: header digest \w+, expected \w+; {OLDER}",
    ),
    "a digested shard of another iteration": Damage(
        digest_another_iteration,
        rf"{SHARD_1}: is the shard of \(iteration, save, rank\) \(20, '[\w.-]+', 1\), expected "
        rf"\(10, '[\w.-]+', 1\); {OLDER}",
    ),
    # All links are refused, as they may lead out of the directory.
    "a symbolic link": Damage(
        lambda made: put_in_place_of(
            made.shard(1), lambda path: path.symlink_to(path.with_suffix(".kept"))
        ),
        rf"{SHARD_1}: cannot read .*a symbolic link stands where a file should be: remove it$",
        StorageError,
    ),
    "a pipe": Damage(
        lambda made: put_in_place_of(made.shard(1), os.mkfifo),
        rf"{SHARD_1}: cannot read .*stands where a file should be: move it away$",
        StorageError,
    ),
    "common with a flipped bit": Damage(
        lambda made: rewrite(made.common, lambda h: bytes([h[0] ^ 1]) + h[1:]),
        rf"\.common\.msgpack: digest \w+, expected \w+; {OLDER}",
    ),
    "manifest of another iteration": Damage(
        lambda made: made.change_manifest(lambda fields: fields.update(iteration=20)),
        "holds iteration 20, so this directory was renamed or copied",
        RenamedCheckpointError,
    ),
    "manifest with an unknown type": Damage(
        change_item(2, "F12"),
        rf"\.end: a template has \d+ elements of type 'F12'; {OLDER}",
    ),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> MadeSave:
    return make(tmp_path_factory.mktemp("good") / "save")


@pytest.fixture
def made(intact: MadeSave, tmp_path: Path) -> Iterator[MadeSave]:
    """Yield a copy of a good checkpoint, for damage."""
    root = tmp_path / "save"
    shutil.copytree(intact.root, root)
    yield dataclasses.replace(intact, root=root)
    shutil.rmtree(root)  # pytest keeps directories, and a pipe would block a grep in them


def damages(made: MadeSave) -> list[FlashCkptError]:
    """Return the damages that `flashckpt verify` reports."""
    try:
        return verify(open_checkpoint(PosixStore(made.root), made.iteration))
    except FlashCkptError as error:
        return [error]


def test_foreign_files_change_nothing(made: MadeSave, capsys: pytest.CaptureFixture[str]) -> None:
    def checked() -> tuple[object, ...]:
        assert damages(made) == []
        tensors = [tensor.numpy().tobytes() for tensor in read_all(made)]
        assert main(["ls", str(made.root)]) == 0
        return tensors, capsys.readouterr().out

    before = checked()
    assert len(before[0]) == sum(map(len, made.pieces))
    for name in (
        "notes.txt",
        "rank_00001.bak",
        shard_name(9, OTHER_SAVE),
        end_name(OTHER_SAVE.replace("00001.1", "00001.x")),
        f".{end_name(OTHER_SAVE)}.12345678.tmp",
        f"{OTHER_SAVE}.ranks_00000-99999999999.record",
    ):
        (made.directory / name).write_bytes(b"")
        os.truncate(made.directory / name, 2**40)
    (made.directory / record_name(range(1, 3), made.save_id)).mkdir()
    for name in ("iter_9", "iter_00000000000000000020"):
        (made.root / name).mkdir()
    assert checked() == before


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_gives_one_clear_error_and_is_not_changed(
    made: MadeSave, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = DAMAGES[name]
    case.apply(made)
    before = snapshot(made.root)
    (damage,) = damages(made)
    with pytest.raises(case.error) as caught:
        read_all(made)
    for error in (damage, caught.value):
        assert type(error) is case.error
        assert re.search(case.message, str(error)), str(error)
        assert str(made.directory) in str(error)
    assert main(["verify", str(made.root)]) == 1
    shown = capsys.readouterr()
    assert for_command(str(damage)) in shown.out
    assert re.search(r"^iter_0000010: 1 problem( \(.*\))?$", shown.out, re.MULTILINE)
    for command in ("ls", "report", "report --json", "inspect", "inspect --json", "verify --all"):
        main([*command.split(), str(made.root)])
        other = capsys.readouterr()
        shown = shown._replace(out=shown.out + other.out, err=shown.err + other.err)
    assert "--ckpt-step" not in shown.out + shown.err, "commands have no option --ckpt-step"
    assert snapshot(made.root) == before


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (change_placement(7, 1), "(master|weight)/layers.w"),
        (change_placement(10, 1), "(master|weight)/layers.w"),
        (change_item(3, [3, 6, 5]), "master/layers.w"),
        (change_item(5, 14), "master/layers.w"),
        (change_item(2, "I32"), "master/layers.w"),
    ],
    ids=["box", "start", "global shape", "elements", "type"],
)
def test_verify_reports_a_manifest_that_contradicts_an_intact_shard(
    made: MadeSave, change: Callable[[MadeSave], None], tensor: str
) -> None:
    """Reads use the manifest, so it could load wrong bytes with right digests."""
    change(made)
    before = snapshot(made.root)
    *tensors, shard = damages(made)
    assert re.search(
        rf"{SHARD_1}: its pieces differ from those in the manifest; {OLDER}", str(shard)
    )
    for error in tensors:
        assert re.search(rf"\.end: (rank 1: .*|{tensor}: .*); {OLDER}", str(error))
    with pytest.raises(FlashCkptError):
        read_all(made)
    with pytest.raises(CorruptCheckpointError, match=r"its pieces differ"):
        made.stored().shard(1)
    assert snapshot(made.root) == before
