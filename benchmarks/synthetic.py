"""Checkpoints of models that are too large for this machine: real shapes without real values.

A `World` shards a Llama-like model as Megatron does. Every replica owns one contiguous range of
each bucket, as with the distributed optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from megatron_flashckpt import FORMAT_VERSION
from megatron_flashckpt.agent.proposals import create_records
from megatron_flashckpt.agent.shard_writer import durable_shard
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.file_names import shard_name
from megatron_flashckpt.file_format.manifest import (
    Manifest,
    ManifestItem,
    ShardEntry,
    decode_manifest,
)
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.template import Layout, Source, order, placed
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.store import Store

KINDS = (("weight", "BF16"), ("master", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32"))
SAVE_ID = "000001-cafe.00001.1"


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder with SwiGLU and grouped-query attention."""

    layers: int
    hidden: int
    ffn: int
    qkv: int
    vocab: int


LLAMA_405B = Model(layers=126, hidden=16384, ffn=53248, qkv=18432, vocab=128256)


@dataclasses.dataclass(frozen=True)
class World:
    """Model under given parallel sizes."""

    model: Model
    tp: int
    pp: int
    dp: int

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def layers(self, stage: int) -> range:
        """Return the layers of a stage; the first stages have one more if they divide unevenly."""
        few, more = divmod(self.model.layers, self.pp)
        start = stage * few + min(stage, more)
        return range(start, start + few + (stage < more))

    def parameters(self, tp: int, stage: int) -> Iterator[list[Piece]]:
        """Yield every whole local parameter of a rank, as a list of pieces."""
        model, hidden = self.model, self.model.hidden
        if stage == 0:
            yield [self._rows("embedding.word_embeddings.weight", model.vocab, tp)]
        for layer in self.layers(stage):
            for name in ("self_attention.linear_qkv", "mlp.linear_fc1"):
                key = f"decoder.layers.{name}.layer_norm_weight"
                yield [_piece(key, (model.layers, hidden), (layer, 0), (1, hidden))]
            attention = "decoder.layers.self_attention"
            yield [self._rows(f"{attention}.linear_qkv.weight", model.qkv, tp, layer)]
            yield [self._columns(f"{attention}.linear_proj.weight", hidden, tp, layer)]
            # One parameter holds the rows of the gate and then the rows of the gated projection.
            rows = model.ffn // self.tp
            yield [
                _piece(
                    "decoder.layers.mlp.linear_fc1.weight",
                    (model.layers, 2 * model.ffn, hidden),
                    (layer, half * model.ffn + tp * rows, 0),
                    (1, rows, hidden),
                )
                for half in (0, 1)
            ]
            yield [self._columns("decoder.layers.mlp.linear_fc2.weight", model.ffn, tp, layer)]
        if stage == self.pp - 1:
            yield [_piece("decoder.final_layernorm.weight", (hidden,), (0,), (hidden,))]
            yield [self._rows("output_layer.weight", model.vocab, tp)]

    def _rows(self, key: str, rows: int, tp: int, layer: int | None = None) -> Piece:
        part, hidden = rows // self.tp, self.model.hidden
        if layer is None:
            return _piece(key, (rows, hidden), (tp * part, 0), (part, hidden))
        shape = (self.model.layers, rows, hidden)
        return _piece(key, shape, (layer, tp * part, 0), (1, part, hidden))

    def _columns(self, key: str, columns: int, tp: int, layer: int) -> Piece:
        part, hidden = columns // self.tp, self.model.hidden
        shape = (self.model.layers, hidden, columns)
        return _piece(key, shape, (layer, 0, tp * part), (1, hidden, part))

    def owned(self, tp: int, stage: int) -> list[list[Piece]]:
        """Return the pieces that each replica's distributed optimizer owns, in layout order."""
        owned: list[list[Piece]] = [[] for _ in range(self.dp)]
        bucket: list[list[Piece]] = []
        limit = max(40_000_000, 1_000_000 * self.dp)
        numel = 0
        for runs in reversed(list(self.parameters(tp, stage))):
            bucket.append(runs)
            numel += sum(run.numel for run in runs)
            if numel >= limit:
                _cut_bucket(bucket, self.dp, owned)
                bucket, numel = [], 0
        _cut_bucket(bucket, self.dp, owned)
        # The first tensor rank writes the tensors that all tensor ranks hold.
        return [
            in_all_kinds([run for run in runs if tp == 0 or "norm" not in run.key])
            for runs in owned
        ]

    def wanted(self, tp: int, stage: int, dp: int) -> list[Piece]:
        """Return all pieces of a rank: replicated weights and its part of the optimizer state."""
        states = [piece for piece in self.owned(tp, stage)[dp] if piece.kind != "weight"]
        return states + [_as(run, *KINDS[0]) for runs in self.parameters(tp, stage) for run in runs]

    def ranks(self) -> Iterator[tuple[Coordinates, list[Piece]]]:
        """Yield every rank's coordinates and the pieces that it writes, in rank order."""
        for stage in range(self.pp):
            for tp in range(self.tp):
                for dp, pieces in enumerate(self.owned(tp, stage)):
                    yield Coordinates(tp=tp, pp=stage, dp=dp, edp=dp), pieces


def _piece(
    key: str, shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]
) -> Piece:
    return Piece(key, "", "", shape, offset, extent, 0, math.prod(extent))


def _as(run: Piece, kind: str, dtype: str) -> Piece:
    return Piece(run.key, kind, dtype, run.global_shape, run.offset, run.shape, run.start, run.end)


def in_all_kinds(runs: list[Piece]) -> list[Piece]:
    """Return the weight, the master and both moments of every run, in layout order."""
    pieces = [_as(run, *kind) for run in runs for kind in KINDS]
    return [pieces[n] for n in order(pieces)]


def _cut_bucket(bucket: list[list[Piece]], dp: int, owned: list[list[Piece]]) -> None:
    """Place a bucket's parameters at multiples of 64, and give each replica its range."""
    placed = []
    position = 0
    for runs in bucket:
        position = -(-position // 64) * 64
        for run in runs:
            placed.append((position, run))
            position += run.numel
    step = math.lcm(dp, 128)
    part = -(-position // step) * step // dp
    for begin, run in placed:
        for replica in range(begin // part, (begin + run.numel - 1) // part + 1):
            low = max(begin, replica * part) - begin
            high = min(begin + run.numel, (replica + 1) * part) - begin
            cut = Piece(run.key, "", "", run.global_shape, run.offset, run.shape, low, high)
            owned[replica].append(cut)


def manifest(world: World) -> Manifest:
    """Return the manifest that a save under `world` would write."""
    keys: dict[str, int] = {}
    templates: dict[tuple[ManifestItem, ...], str] = {}
    shards = []
    for rank, (coordinates, pieces) in enumerate(world.ranks()):
        placed_at, placement = placed(pieces)
        items = tuple(
            ManifestItem(
                keys.setdefault(piece.key, len(keys)),
                piece.kind,
                piece.dtype,
                piece.global_shape,
                piece.shape,
                piece.numel,
                position,
            )
            for piece, position in zip(pieces, placed_at, strict=True)
        )
        shards.append(
            ShardEntry(
                rank=rank,
                coordinates=coordinates,
                file=shard_name(rank, SAVE_ID),
                nbytes=4096 + sum(piece.nbytes for piece in pieces),
                header_digest="0" * 16,
                template=templates.setdefault(items, f"{len(templates):032x}"),
                placement=placement,
            )
        )
    return Manifest(
        version=FORMAT_VERSION,
        iteration=1000,
        save_id=SAVE_ID,
        world_size=world.size,
        description={},
        common_digest="0" * 16,
        keys=tuple(keys),
        templates={name: items for items, name in templates.items()},
        shards=tuple(shards),
    )


def decoded_sources(encoded: bytes) -> list[Source]:
    """Return the sources of a load from the bytes of a manifest."""
    decoded = decode_manifest(encoded, "the manifest")
    templates = {name: decoded.template(name) for name in decoded.templates}
    return [
        Source(shard.rank, templates[shard.template], shard.placement) for shard in decoded.shards
    ]


def slot_meta(root: str, layout: Layout, *, common: bytes = b"", **fields: Any) -> SlotMeta:
    """Return the meta of a slot with this layout, by default of the only rank of a job."""
    alone = {"rank": 0, "world_size": 1, "coordinates": Coordinates(), "description": {}}
    return SlotMeta(
        root=root,
        template_fingerprint=layout.template_fingerprint,
        template=layout.template,
        placement=layout.placement,
        common=common,
        **{**alone, **fields},
    )


def write_shard(
    store: Store,
    iteration: int,
    save_id: str,
    meta: SlotMeta,
    chunks: Iterator[memoryview],
    flow: Flow,
) -> None:
    """Write one rank's shard and its commit record, as an agent does."""
    shard = durable_shard(store, iteration, save_id, meta, chunks, None, flow)
    create_records(store, [shard.record])
