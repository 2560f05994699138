"""Checkpoints made without Megatron: known tensors, sharded as TP 2 x DP 2, persisted, committed.

Only the training process is simulated; slot, persist and commit are the real code.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash

from megatron_flashckpt.agent.proposals import create_records, propose_manifest
from megatron_flashckpt.agent.shard_writer import slot_shard
from megatron_flashckpt.agent.track import moved_tracker
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.end import End, Failure, encode_failure
from megatron_flashckpt.file_format.file_names import run_name, save_name
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.file_format.seal import seal
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece, equal_shares
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import PlanCache, order
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Store
from tests.support.stored import read_all as read_stored

TP, DP = 2, 2
WORLD = TP * DP
LAYERS = 2
#: Run of the saves that a test makes, unless it names others.
RUN = run_name(1, "0a1b")
SAVE_ID = save_name(RUN, 1)
#: Size limit of every file in a test, files with holes excepted.
_SPARSE_NBYTES = 2**30
DESCRIPTION = {
    "tensor_model_parallel_size": TP,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "data_parallel_size": DP,
    "megatron_core": "0.0",
}


def content(piece: Piece, seed: int = 0) -> bytes:
    """Return the bytes of `piece`, which depend on its name, its range and the seed alone."""
    name = f"{seed} {piece.kind} {piece.key}"
    source = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
    width = itemsize(piece.dtype)
    whole = source.integers(0, 256, (*piece.global_shape, width), dtype=np.uint8)
    region = zip(piece.offset, piece.shape, strict=True)
    box = whole[tuple(slice(low, low + extent) for low, extent in region)]
    return box.reshape(-1, width)[piece.start : piece.end].tobytes()


def whole_boxes(tp: int) -> list[Piece]:
    """Return the part of the model that a rank at `tp` holds before replicas share it."""
    boxes = []
    for kind, dtype in (("weight", "BF16"), ("master", "F32"), ("exp_avg", "F32")):
        for layer in range(LAYERS):
            # Odd sizes make shares end within rows.
            shape, offset = (1, 3, 5), (layer, 3 * tp, 0)
            boxes.append(Piece("layers.w", kind, dtype, (LAYERS, 6, 5), offset, shape, 0, 15))
            if tp == 0:
                norm = Piece("layers.norm", kind, dtype, (LAYERS, 7), (layer, 0), (1, 7), 0, 7)
                boxes.append(norm)
    return boxes


def pieces_of_rank(rank: int) -> list[Piece]:
    """Return the pieces that `rank` writes; all ranks together write every element exactly once."""
    tp, dp = rank % TP, rank // TP
    boxes = whole_boxes(tp)
    shares = equal_shares([(b.numel, itemsize(b.dtype)) for b in boxes], DP, dp)
    pieces = [
        msgspec.structs.replace(box, start=start, end=end)
        for box, (start, end) in zip(boxes, shares, strict=True)
        if start < end
    ]
    if rank == 0:
        pieces.append(Piece("layers.bias", "buffer", "F32", (3,), (0,), (3,), 0, 3))
    # The ranks' own states differ in size, as in Megatron's jobs.
    nbytes = 40 + 8 * rank
    shape = (WORLD, nbytes)
    pieces.append(Piece("rank_state", "rank_state", "U8", shape, (rank, 0), (1, nbytes), 0, nbytes))
    return [pieces[i] for i in order(pieces)]


@dataclasses.dataclass(frozen=True)
class MadeSave:
    """A committed checkpoint, and accessors of its files."""

    root: Path
    iteration: int
    save_id: str
    pieces: list[list[Piece]]
    seed: int

    @property
    def directory(self) -> Path:
        return self.root / file_names.iteration_dir(self.iteration)

    @property
    def manifest(self) -> Path:
        return self.directory / file_names.end_name(self.save_id)

    @property
    def common(self) -> Path:
        return self.directory / file_names.common_name(self.save_id)

    def shard(self, rank: int) -> Path:
        return self.directory / file_names.shard_name(rank, self.save_id)

    def stored(self) -> StoredCheckpoint:
        store, save = PosixStore(self.root), Save(self.iteration, self.save_id)
        return StoredCheckpoint(store, save, read_manifest(store, save))

    def change_manifest(self, change: Callable[[dict], object]) -> None:
        """Apply `change` to the manifest, seal it again and write it."""
        fields = msgspec.json.decode(self.manifest.read_bytes())
        del fields["digest"]
        change(fields)
        self.manifest.write_bytes(seal(msgspec.json.encode(fields)))

    def forge(self, rank: int, header: bytes) -> None:
        """Replace the header of a shard, and record the new digest in the manifest."""
        file = self.shard(rank)
        length = int.from_bytes(file.read_bytes()[:8], "little")
        forged = header + file.read_bytes()[8 + length :]
        file.write_bytes(forged)

        def put_digested_manifest(fields: dict) -> None:
            fields["shards"][rank]["nbytes"] = len(forged)
            fields["shards"][rank]["header_digest"] = xxhash.xxh3_64_hexdigest(header)

        self.change_manifest(put_digested_manifest)


def make(
    root: Path,
    iteration: int = 10,
    save_id: str = SAVE_ID,
    *,
    ranks: list[list[Piece]] | None = None,
    seed: int = 0,
    common: bytes | None = None,
    ancestors: Ancestors = (),
    content_of: Callable[[Piece], bytes] | None = None,
) -> MadeSave:
    """Return a committed checkpoint under `root`, which the tracker names.

    Args:
        content_of: returns the bytes of a piece; default: `content` with `seed`.
    """
    content_of = content_of or functools.partial(content, seed=seed)
    pieces = [pieces_of_rank(rank) for rank in range(WORLD)] if ranks is None else ranks
    store = PosixStore(root)
    metas = [
        persist(store, iteration, save_id, rank, len(pieces), held, content_of, common, ancestors)
        for rank, held in enumerate(pieces)
    ]
    directory = file_names.iteration_dir(iteration)
    names = [entry.name for entry in store.list(directory)]
    ended = propose_manifest(store, iteration, save_id, metas[0], names)
    assert ended.end is End.COMMITTED
    moved_tracker(store, Save(iteration, save_id), None)
    records = file_names.records_of(names, save_id, len(pieces))
    store.delete([f"{directory}/{name}" for name in records])
    return MadeSave(root, iteration, save_id, pieces, seed)


def fail(root: Path, iteration: int, save_id: str, reason: str) -> Path:
    """Return the end of a failed save under `root`."""
    name = f"{file_names.iteration_dir(iteration)}/{file_names.end_name(save_id)}"
    PosixStore(root).create(name, encode_failure(Failure(failed=reason)))
    return root / name


def persist(
    store: Store,
    iteration: int,
    save_id: str,
    rank: int,
    world_size: int,
    pieces: list[Piece],
    content_of: Callable[[Piece], bytes] = content,
    common: bytes | None = None,
    ancestors: Ancestors = (),
) -> SlotMeta:
    """Make one rank's shard and commit record durable from a real slot."""
    layout = PlanCache().layout(pieces)
    meta = SlotMeta(
        root=store.place,
        rank=rank,
        world_size=world_size,
        coordinates=Coordinates(tp=rank % TP, dp=rank // TP),
        template_fingerprint=layout.template_fingerprint,
        template=layout.template,
        placement=layout.placement,
        common=(common or b"common of %d" % iteration) if rank == 0 else b"",
        description=DESCRIPTION,
        ancestors=ancestors,
    )
    encoded = msgspec.msgpack.encode(meta)
    slab = Slab.create(1, len(encoded), layout.nbytes, str(rank))
    try:
        (slot,) = slab.slots
        header = SlotHeader(SlotState.STAGED, iteration, save_id, len(encoded), layout.nbytes)
        slot.set_header(header)
        slot.set_meta(encoded)
        with slot.data() as data:
            data[:] = b"".join(map(content_of, pieces))
        shard = slot_shard(store, slot, header, slot.meta)
        assert shard.record is not None
        create_records(store, [shard.record])
    finally:
        slab.close()
    return meta


def read(stored: StoredCheckpoint, wanted: list[Piece], threads: int = 2) -> list[torch.Tensor]:
    """Return the `wanted` pieces as flat bytes read from storage."""
    tensors = [torch.zeros(piece.nbytes, dtype=torch.uint8) for piece in wanted]
    plan = read_plan(wanted, stored.sources(), stored.place)
    read_stored(stored, plan, wanted, Targets(wanted, tensors), threads)
    return tensors


def read_all(made: MadeSave, threads: int = 2) -> list[torch.Tensor]:
    """Read all data that a job would read, the common file included."""
    stored = made.stored()
    stored.common()
    return read(stored, [piece for held in made.pieces for piece in held], threads)


def expected(pieces: Iterable[Piece], seed: int = 0) -> list[torch.Tensor]:
    """Return the result that `read` must have."""
    contents = (np.frombuffer(content(piece, seed), dtype=np.uint8) for piece in pieces)
    return [torch.from_numpy(flat.copy()) for flat in contents]


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Return names, types, modes, times and bytes of all files under `root`."""
    entries: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        held: object = None
        if stat.S_ISLNK(status.st_mode):
            held = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            held = path.read_bytes() if status.st_size < _SPARSE_NBYTES else status.st_size
        entries[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, held)
    return entries
