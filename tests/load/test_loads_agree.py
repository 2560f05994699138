"""Failure of a load on all real gloo ranks when one rank has no memory for it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch.distributed as dist

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.load import loader, memory_source, storage_source
from megatron_flashckpt.load.chunk_reader import ChunkReader
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.load_request import LoadRequest
from megatron_flashckpt.load.memory_checkpoints import MemoryCheckpoint
from megatron_flashckpt.load.side_state import SideState
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.checkpoints import SAVE_ID, make, persist, pieces_of_rank
from tests.support.forked.nursery import call_in_ranks

RANKS = 2
SAVE = Save(10, SAVE_ID)
REQUEST = LoadRequest(
    ModelState(Config().replicated), chunks=[], optimizer=None, policy=LoadPolicy(fill=False)
)


def _reader(*args: Any) -> ChunkReader:
    if dist.get_rank() == 1:
        raise MemoryError("no memory for a buffer")
    return ChunkReader(*args)


def _in_memory(rank: int, where: Path) -> MemoryCheckpoint:
    store = PosixStore(where / "other")
    meta = persist(store, 10, SAVE_ID, rank, RANKS, pieces_of_rank(rank))
    encoded = msgspec.msgpack.encode(meta)
    slab = Slab.create(1, len(encoded), meta.template.nbytes, str(rank))
    (slot,) = slab.slots
    nbytes = meta.template.nbytes
    slot.set_header(SlotHeader(SlotState.STAGED, 10, SAVE_ID, len(encoded), nbytes))
    slot.set_meta(encoded)
    return MemoryCheckpoint(slab, Offer(0, 10, SAVE_ID, False, None))


def _load(rank: int, where: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{where}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=20),
    )
    side: tuple[Any, ...] = (SideState({"args": None}, None, [], {}), {})
    with (
        mock.patch.object(parallel, "coordinates", return_value=Coordinates(dp=rank)),
        mock.patch.object(parallel, "model_sizes", return_value=(1, 1, 1)),
        mock.patch.object(parallel, "data_parallel_group", return_value=None),
        mock.patch.object(loader, "read_side_state", return_value=side),
        mock.patch.object(memory_source, "ChunkReader", _reader),
        mock.patch.object(storage_source, "ChunkReader", _reader),
    ):
        stored = storage_source.open_stored(PosixStore(where / "save"), SAVE, Config())
        held = memory_source.open_memory(_in_memory(rank, where), Config())
        for name, source in (("storage", stored), ("memory", held)):
            try:
                loader.load(REQUEST, source)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                (where / f"{name}{rank}").write_text(json.dumps(message))
    dist.destroy_process_group()


def test_all_ranks_fail_if_one_has_no_memory_for_buffers(tmp_path: Path) -> None:
    make(tmp_path / "save", ranks=[pieces_of_rank(rank) for rank in range(RANKS)])
    call_in_ranks(_load, (tmp_path,), RANKS)
    for source in ("storage", "memory"):
        messages = [json.loads((tmp_path / f"{source}{rank}").read_text()) for rank in range(RANKS)]
        assert messages == ["FlashCkptError: rank 1: MemoryError: no memory for a buffer"] * RANKS
