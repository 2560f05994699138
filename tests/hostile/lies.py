"""Random damage to a checkpoint, as a disk, a crash, a person or an attacker causes it."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.file_format.seal import seal
from tests.support.checkpoints import MadeSave

OTHER_SAVE = "000002-ba98.00001.1"


@dataclasses.dataclass(frozen=True)
class Scene:
    """Two committed checkpoints in one directory, and files outside of it."""

    older: MadeSave
    newest: MadeSave
    other: MadeSave
    """Another save of the newest iteration, in a different directory."""
    outside: Path
    """Directory that must never change; a pickle bomb would create a directory here."""

    @property
    def root(self) -> Path:
        return self.newest.root

    @property
    def tracker(self) -> Path:
        return self.root / TRACKER

    def files(self) -> list[Path]:
        """All files of the newest checkpoint."""
        shards = [self.newest.shard(rank) for rank in range(len(self.newest.pieces))]
        return [*shards, self.newest.manifest, self.newest.common]


Damage = Callable[[Scene, random.Random], object]


# ---------------- bytes


def rewrite(file: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)


def truncate(scene: Scene, dice: random.Random) -> None:
    file = dice.choice(scene.files())
    os.truncate(file, dice.randrange(file.stat().st_size))


def flip_bits(content: bytearray, dice: random.Random, most: int = 8) -> None:
    bits = dice.sample(range(8 * len(content)), min(dice.randint(1, most), 8 * len(content)))
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8


def flip(scene: Scene, dice: random.Random) -> None:
    most = dice.choice([1, 8])
    rewrite(dice.choice(scene.files()), lambda content: flip_bits(content, dice, most))


def zeros(scene: Scene, dice: random.Random) -> None:
    def change(content: bytearray) -> None:
        start = dice.randrange(len(content))
        end = dice.randint(start + 1, len(content))
        while not any(content[start:end]):  # overwriting zeros would change nothing
            start = start // 2
            end = len(content)
        content[start:end] = bytes(end - start)

    rewrite(dice.choice(scene.files()), change)


def append(scene: Scene, dice: random.Random) -> None:
    rewrite(dice.choice(scene.files()), lambda content: content.extend(dice.randbytes(9)))


def garbage(scene: Scene, dice: random.Random) -> None:
    dice.choice(scene.files()).write_bytes(dice.randbytes(dice.choice([0, 1, 8, 100, 5000])))


def huge(scene: Scene, dice: random.Random) -> None:
    """Make a sparse file of 1 TB, which no reader may read completely."""
    os.truncate(dice.choice(scene.files()), 2**40)


# ---------------- the wrong files


def swap(scene: Scene, dice: random.Random) -> None:
    one, other = dice.sample(scene.files(), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def of_another_iteration(scene: Scene, dice: random.Random) -> None:
    _copy_a_file(scene.older, scene.newest, dice)


def of_another_save(scene: Scene, dice: random.Random) -> None:
    _copy_a_file(scene.other, scene.newest, dice)


def _copy_a_file(source: MadeSave, to: MadeSave, dice: random.Random) -> None:
    rank = dice.randrange(len(to.pieces))
    pairs = [
        (source.shard(rank), to.shard(rank)),
        (source.manifest, to.manifest),
        (source.common, to.common),
    ]
    shutil.copyfile(*dice.choice(pairs))


def missing(scene: Scene, dice: random.Random) -> None:
    dice.choice(scene.files()).unlink()


# ---------------- not files


def in_place(path: Path, outside: Path, dice: random.Random) -> None:
    """Replace `path` by an entry that is not a regular file."""
    kept = path.with_name(path.name + ".kept")
    path.rename(kept)
    match dice.randrange(8):
        case 0:
            path.symlink_to(kept.name)
        case 1:
            path.symlink_to(outside / "precious")
        case 2:
            path.symlink_to("nowhere")
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.symlink_to("/dev/zero")
        case 5:
            path.mkdir()
        case 6:
            os.mkfifo(path)
        case 7:
            path.symlink_to(outside)


def no_file(scene: Scene, dice: random.Random) -> None:
    in_place(dice.choice(scene.files()), scene.outside, dice)


def no_directory(scene: Scene, dice: random.Random) -> None:
    """Remove the directory of the newest checkpoint, or replace it by another entry.

    Readers follow a link to a directory with a complete checkpoint of that iteration, because
    people move checkpoints to other disks. The package never writes or deletes through such a link.
    """
    directory = scene.newest.directory
    shutil.rmtree(directory)
    match dice.randrange(6):
        case 0:
            directory.mkdir()
        case 1:
            directory.write_bytes(b"x")
        case 2:
            directory.symlink_to(scene.older.directory.name)
        case 3:
            directory.symlink_to(directory.name)
        case 4:
            directory.symlink_to(scene.outside)
        case 5:
            os.mkfifo(directory)


# ---------------- the tracker


def tracker(scene: Scene, dice: random.Random) -> None:
    texts: list[bytes] = [
        b"20/../../outside",
        b"9" * 5000,
        "\u0662\u0660\u0660".encode(),
        dice.randbytes(20),
    ]
    match dice.randrange(4):
        case 0:
            scene.tracker.write_bytes(dice.choice(texts))
        case 1:
            rewrite(scene.tracker, lambda content: flip_bits(content, dice, 3))
        case 2:
            os.truncate(scene.tracker, dice.choice([0, 1, 2**40]))
        case 3:
            in_place(scene.tracker, scene.outside, dice)


# ---------------- forgeries with right digests


HOSTILE: list[Any] = [
    -1,
    0,
    1,
    2**31,
    2**53,
    2**62,
    2**63 - 1,
    2**64,
    10**40,
    -(2**63),
    1.5,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "../../outside/precious",
    "/etc/passwd",
    "000001-0a1b.00001.1.rank_00000.safetensors/../../x",
    "\0",
    "weight",
    "F32",
    "U8",
    [],
    {},
    [2**40, 2**40],
    [-1],
    [0] * 1000,
]


def entries_of(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON tree."""
    places = []
    items: Any = ()
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    for key, value in items:
        places.append((tree, key))
        places += entries_of(value)
    return places


def mutate(tree: Any, dice: random.Random) -> None:
    """Change one to three entries of a JSON tree."""
    for _ in range(dice.randint(1, 3)):
        container, key = dice.choice(entries_of(tree))
        match dice.randrange(4):
            case 0 | 1:
                container[key] = dice.choice(HOSTILE)
            case 2 if isinstance(container, list):
                container.insert(key, dice.choice(container))
            case 2:
                container[f"{key}x"] = container.pop(key)
            case 3 if isinstance(container[key], int):
                container[key] += dice.choice([-1, 1, 4, 2**40])
            case 3:
                del container[key]


def forge_manifest(scene: Scene, dice: random.Random) -> None:
    manifest = json.loads(scene.newest.manifest.read_bytes())
    del manifest["digest"]
    mutate(manifest, dice)
    scene.newest.manifest.write_bytes(seal(json.dumps(manifest).encode()))


def forge_header(scene: Scene, dice: random.Random) -> None:
    """Forge a header whose digests in the file and the manifest are right."""
    rank = dice.randrange(len(scene.newest.pieces))
    content = scene.newest.shard(rank).read_bytes()
    entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = json.loads(entries["__metadata__"]["flashckpt"])
    mutate(dice.choice([entries, metadata, metadata]), dice)
    if "__metadata__" in entries and isinstance(entries["__metadata__"], dict):
        entries["__metadata__"]["flashckpt"] = json.dumps(metadata)
    body = json.dumps(entries).encode()
    if dice.random() < 0.1:  # a duplicate key
        body = body[:-1] + b"," + body[1:]
    length = dice.choice([len(body)] * 8 + [2**63, 99_999_999, 1])
    scene.newest.forge(rank, struct.pack("<Q", length) + body)


class Bomb:
    """Object whose unpickling calls `os.mkdir`, if the unpickler allows any call."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def pickle_bomb(scene: Scene, dice: random.Random) -> None:
    common = scene.newest.common
    common.write_bytes(pickle.dumps(Bomb(scene.outside / "pwned"), protocol=dice.choice([0, 2, 4])))
    if dice.random() < 0.9:
        digest = xxhash.xxh3_64_hexdigest(common.read_bytes())
        scene.newest.change_manifest(lambda manifest: manifest.update(common_digest=digest))


#: Damage that a load detects; the load then uses the older checkpoint.
PLAIN: list[Damage] = [
    truncate,
    *[flip] * 4,
    zeros,
    append,
    garbage,
    huge,
    swap,
    of_another_iteration,
    of_another_save,
    missing,
    no_file,
    no_directory,
]
#: Damage by an attacker with right digests. An attacker with write access can also write an intact
#: checkpoint, but no file may harm its reader.
FORGED: list[Damage] = [
    forge_manifest,
    forge_manifest,
    forge_header,
    forge_header,
    pickle_bomb,
]
