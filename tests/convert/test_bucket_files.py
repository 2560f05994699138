"""Optimizer state by bucket (`dp_reshardable`) without a job: how much of a file is read."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.convert.common import ddp_buckets
from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.tensor_parts import by_kind
from megatron_flashckpt.convert.readers import dcp
from megatron_flashckpt.convert.readers.torch_dist import open_torch_dist
from megatron_flashckpt.convert.writers import legacy_optimizer
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.megatron_lm.rebuild.rank_models import rank_models
from tests.convert.made import differing, held
from tests.convert.rebuilt import ITERATION, arguments, contents

REPLICAS = 4


def by_bucket(made: Contents) -> Contents:
    """Return `made` with its optimizer state in one bucket, which the replicas share equally."""
    (model,) = rank_models(made.args)
    tensors = by_kind(made.tensors)
    ((chunks),) = ddp_buckets.sub_optimizers(model, made.args, experts=False)
    (buffer,) = legacy_optimizer._buffers(model, made.args, chunks, tensors)[0].values()
    numel = buffer.pop("numel_unpadded")
    share = -(-numel // REPLICAS)
    boxes: tuple[Box, ...] = tuple(
        ((start,), (min(share, numel - start),)) for start in range(0, numel, share)
    )
    place = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(bf16, fp32).bucket_idx_0"
    # The writer takes them for weights, whose names it leaves as they are.
    states = [held(f"{place}.{state}", "weight", flat, boxes) for state, flat in buffer.items()]
    return dataclasses.replace(made, tensors=[*tensors["weight"].values(), *states])


@pytest.fixture
def made() -> Contents:
    return contents(arguments(use_distributed_optimizer=True, hidden_size=96, kv_channels=12))


def test_a_parameter_is_read_without_the_rest_of_its_bucket(
    tmp_path: Path, made: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_torch_dist(by_bucket(made), tmp_path, Options())
    read_nbytes = []
    content = dcp.Reader._content

    def note(reader: dcp.Reader, file: Path, position: int, nbytes: int) -> bytes:
        read_nbytes.append(nbytes)
        return content(reader, file, position, nbytes)

    monkeypatch.setattr(dcp.Reader, "_content", note)
    opened = open_torch_dist(directory, ITERATION, Options())
    assert differing(opened.tensors, made.tensors) == []
    # Weights and masters are read twice: all are compared before the first is written.
    assert sum(read_nbytes) < 2.5 * sum(tensor.nbytes for tensor in made.tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_differences_from_the_masters_are_accepted_in_16_bit_weights_only(
    dtype: torch.dtype,
) -> None:
    """These are made again from their masters; fp32 weights are their own masters."""
    args = arguments(use_distributed_optimizer=True)
    (model,) = rank_models(args)
    (chunks,) = ddp_buckets.sub_optimizers(model, args, experts=False)
    dtypes = {(0, parameter.name): dtype for parameter in model.chunks[0].parameters}
    (buffer,) = ddp_buckets.buffers(model, args, chunks, dtypes, ddp_buckets.RULES[0])
    is_refused = dtype == torch.float32
    with pytest.raises(CorruptCheckpointError) if is_refused else contextlib.nullcontext():
        ddp_buckets.buffer_parts(
            buffer,
            {ddp_buckets.MAIN: torch.float32},
            weight=lambda place: torch.zeros(place.parameter.numel, dtype=dtype),
            read=lambda state, place, start, end: torch.ones(end - start),
            where="here",
            remedy=None,
        )


def test_elements_of_a_view_are_those_of_the_view(tmp_path: Path, made: Contents) -> None:
    """`torch.save` writes the whole storage of a view."""
    flat = torch.arange(100.0)
    view = flat[30:70]
    torch.save(view, tmp_path / "__0_0.distcp")
    nbytes = (tmp_path / "__0_0.distcp").stat().st_size
    directory = write_torch_dist(
        dataclasses.replace(made, tensors=[held("flat", "weight", view, (((0,), (40,)),))]),
        tmp_path / "save",
        Options(),
    )
    reader = dcp.Reader(directory)
    (tmp_path / "__0_0.distcp").replace(directory / "view.distcp")
    reader._storage["flat", (0,)] = dcp.filesystem._StorageInfo("view.distcp", 0, nbytes)
    assert torch.equal(reader.elements("flat", (0,), 5, 40), flat[35:70])


def test_a_stage_without_embedding_lists_the_group_without_weight_decay_first() -> None:
    """Megatron until core 0.13 loads the groups of legacy files by number."""
    args = arguments(use_distributed_optimizer=True, pipeline_model_parallel_size=2)
    made = contents(args)
    tensors = by_kind(made.tensors)
    first = []
    for model in rank_models(args):
        state, _ = legacy_optimizer.of_rank(model, made, tensors, experts=False)
        first.append([group["wd_mult"] for group in state["optimizer"]["param_groups"]])
    assert first == [[1.0, 0.0], [0.0, 1.0]]
