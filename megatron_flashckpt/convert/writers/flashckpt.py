"""Writer of our own format: boxes in files of bounded size, committed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from megatron_flashckpt.agent.alive import Admission
from megatron_flashckpt.agent.runs import new_run, open_run
from megatron_flashckpt.agent.shard_writer import durable_shard
from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import choose
from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.convert.common.former_export import CONVERTED_FROM
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.output_dir import move_tracker, new_directory
from megatron_flashckpt.file_format import manifest
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.file_names import (
    common_name,
    end_name,
    iteration_dir,
    run_file,
    run_number,
    save_name,
)
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.layout.template import PlanCache, order
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.job_description import facts, versions
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.store import Store

_Boxes = list[tuple[GlobalTensor, Box]]


def write_ours(contents: Contents, root: Path, options: Options) -> Path:
    """Write `contents` as a committed checkpoint under `root`; return its directory.

    Raises:
        ConfigError: a checkpoint of that iteration exists and may not be replaced.
    """
    directory = root / iteration_dir(contents.iteration)
    with (
        new_directory(directory, overwrite=options.overwrite, mark=False) as fresh,
        _new_run(open_store(root)) as run,
    ):
        save_id = save_name(run.name, 1)
        _write(contents, open_store(fresh.parent), run, save_id, options.shard_nbytes)
    move_tracker(root, contents.iteration, save_id=save_id)
    return directory


@contextlib.contextmanager
def _new_run(store: Store) -> Iterator[RunObject]:
    """Yield a run that has made the converted checkpoint; its object is deleted after an error.

    The run continues the checkpoint that a load would choose now. So what counts in the directory
    still counts, and the converted checkpoint counts, too.

    Raises:
        OtherWriterError: a job trains into the directory, or its agent still writes a save there;
            its later saves would not count.
    """
    admission = Admission(store, "refuse", 0.0, connect=None)
    admission.await_end()  # first, because a run that ends meanwhile may leave a checkpoint
    facts = read_facts(store)
    candidates = choose(facts).candidates
    save = candidates[0].save if candidates else None
    ancestors = () if save is None else facts.runs.get(save.run, ())
    wanted = new_run(save, ancestors, "scratch" if save is None else "storage", world_size=0)
    run = open_run(admission, wanted)
    try:
        yield run
    except BaseException:  # Ctrl-C, too
        store.delete([run_file(run_number(run.name))])
        raise


def _write(
    contents: Contents, store: Store, run: RunObject, save_id: str, shard_nbytes: int
) -> None:
    shards = _shards(contents, shard_nbytes)
    records = []
    for rank, (coordinates, own_boxes) in enumerate(shards):
        state = side_state.frame(_rank_state(contents, coordinates), rank, len(shards))
        pieces = [_piece(tensor, box) for tensor, box in own_boxes] + [state.piece]
        positions = order(pieces)
        layout = PlanCache().layout([pieces[position] for position in positions])
        meta = SlotMeta(
            root=store.place,
            rank=rank,
            world_size=len(shards),
            coordinates=coordinates,
            template_fingerprint=layout.template_fingerprint,
            template=layout.template,
            placement=layout.placement,
            common=b"",
            description={},
        )
        boxes = [*own_boxes, None]
        tensors = (
            state.tensor if (box := boxes[position]) is None else box[0].read(box[1])
            for position in positions
        )
        durable = durable_shard(store, contents.iteration, save_id, meta, _chunks(tensors))
        records.append(durable.record)
    common = side_state.encode_common(contents.common)
    merged = manifest.merge(
        records,
        world_size=len(shards),
        description={**versions(), **facts(contents.args), CONVERTED_FROM: contents.place},
        common_digest=xxhash.xxh3_64_hexdigest(common),
        ancestors=run.ancestors,
        committed_at=time.time(),
    )
    directory = iteration_dir(contents.iteration)
    end = f"{directory}/{end_name(save_id)}"
    manifest.check(merged, f"{store.place}/{end}")
    store.create(f"{directory}/{common_name(save_id)}", common)
    store.create(end, manifest.encode_manifest(merged))


def _shards(contents: Contents, limit_nbytes: int) -> list[tuple[Coordinates, _Boxes]]:
    """Return the boxes in files of about `limit_nbytes`, and whose rank each file represents.

    A rank loads its side state from the file with its coordinates. So every place in the parallel
    layout, and every replica if replicas differ, has a file, even without boxes.
    """
    files: list[_Boxes] = [[]]
    free = limit_nbytes
    for tensor in contents.tensors:
        for box in tensor.boxes:
            nbytes = torch.Size(box[1]).numel() * tensor.dtype_of(box).itemsize
            if nbytes > free and files[-1]:
                files.append([])
                free = limit_nbytes
            files[-1].append((tensor, box))
            free -= nbytes
    places = _places(contents)
    files += [[] for _ in range(len(places) - len(files))]
    replicas = 1 + max(place.dp for place in places)
    shards = []
    for number, boxes in enumerate(files):
        # If there are more files than places, the further files represent further replicas.
        turn, position = divmod(number, len(places))
        place = places[position]
        dp = place.dp + turn * replicas
        shards.append((msgspec.structs.replace(place, dp=dp), boxes))
    return shards


def _places(contents: Contents) -> list[Coordinates]:
    """Return the coordinates in the parallel layout whose side state differs.

    If replicas differ, a load needs all coordinates of a rank to find the rank's own state.
    """
    args = contents.args
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    ways = getattr(args, "tensor_model_parallel_size", None) or 1
    replicas = max((len(states) for states in contents.rng.values()), default=1)
    context = (getattr(args, "context_parallel_size", None) or 1) if replicas > 1 else 1
    experts = getattr(args, "expert_model_parallel_size", None) or 1
    expert_ways = getattr(args, "expert_tensor_parallel_size", None) or ways
    places = []
    for dp, cp, pp, tp in itertools.product(*map(range, (replicas, context, stages, ways))):
        # Megatron numbers the ranks of a stage by tensor, context and data parallel rank, and
        # divides the same numbers among expert tensor, expert and expert data parallel ranks.
        edp, rest = divmod(tp + ways * (cp + context * dp), expert_ways * experts)
        places.append(Coordinates(tp=tp, pp=pp, dp=dp, cp=cp, ep=rest // expert_ways, edp=edp))
    return places


def _rank_state(contents: Contents, place: Coordinates) -> dict[str, Any]:
    """Return the side state in the form of `side_state.rank_state`."""
    rng = contents.rng.get((place.pp, place.tp))
    return {
        "rng": rng[min(place.dp, len(rng) - 1)] if rng else None,
        "optimizer": contents.optimizer or [],
        "rerun": None,
        # All objects: a load reads them from the first file with the rank's coordinates, and under
        # another layout a module may be on any rank.
        "objects": contents.objects,
    }


def _piece(tensor: GlobalTensor, box: Box) -> Piece:
    offset, shape = box
    numel = torch.Size(shape).numel()
    dtype = dtype_name(tensor.dtype_of(box))
    return Piece(tensor.key, tensor.kind, dtype, tensor.shape, offset, shape, 0, numel)


def _chunks(tensors: Iterator[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the concatenated bytes of all tensors in chunks; at most one box is in memory."""
    chunk = bytearray(CHUNK_NBYTES)
    filled = 0
    for tensor in tensors:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        position = 0
        while position < len(flat):
            nbytes = min(CHUNK_NBYTES - filled, len(flat) - position)
            chunk[filled : filled + nbytes] = flat[position : position + nbytes]
            filled += nbytes
            position += nbytes
            if filled == CHUNK_NBYTES:
                yield memoryview(chunk)
                filled = 0
    if filled:
        yield memoryview(chunk)[:filled]
