"""Megatron's torch_dist format without Megatron: files, damage, hostile pickles."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.convert.readers.dcp import Reader
from megatron_flashckpt.convert.readers.torch_dist import open_torch_dist
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from megatron_flashckpt.file_format.file_names import TRACKER
from tests.convert.made import ITERATION, contents, differing, held, rng, whole, with_tensor
from tests.support.checkpoints import snapshot
from tests.support.megatron_jobs import same


class Trap:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@contextlib.contextmanager
def changed_metadata(directory: Path) -> Iterator[Metadata]:
    """Yield the contents of `.metadata`, which are written again."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))


def with_fp32_weights(made: Contents) -> Contents:
    """Return `made` with its masters as weights."""
    tensors = [
        dataclasses.replace(tensor, kind="weight") if tensor.kind == "master" else tensor
        for tensor in made.tensors
        if tensor.kind != "weight"
    ]
    return dataclasses.replace(made, tensors=tensors)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_written_checkpoint_is_read_back_bit_for_bit(tmp_path: Path, distributed: bool) -> None:
    made = contents()
    made.args.use_distributed_optimizer = distributed
    directory = write_torch_dist(made, tmp_path, Options(shard_nbytes=500))
    reopened = open_torch_dist(directory, ITERATION, Options())
    assert differing(made.tensors, reopened.tensors) == []
    assert [tensor.boxes for tensor in reopened.tensors] == [
        tensor.boxes for tensor in made.tensors
    ]
    assert reopened.optimizer == made.optimizer
    assert reopened.common["opt_param_scheduler"] == made.common["opt_param_scheduler"]
    assert reopened.args.tensor_model_parallel_size == 2
    assert same(reopened.rng, made.rng)
    assert same(reopened.objects, made.objects)
    assert len(list(directory.glob("*.distcp"))) > 3
    assert (tmp_path / TRACKER).read_text() == str(ITERATION)


def test_torch_itself_reads_every_tensor(tmp_path: Path) -> None:
    made = contents()
    directory = write_torch_dist(made, tmp_path, Options(shard_nbytes=500))
    names = {"weight": "", "buffer": "", "master": "optimizer.state.param."}
    expected = {
        names.get(tensor.kind, f"optimizer.state.{tensor.kind}.") + tensor.key: whole(tensor)
        for tensor in made.tensors
    }
    reopened = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(reopened, checkpoint_id=directory, no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(reopened[name], tensor), name


def test_fp32_parameters_are_written_as_masters_and_read_once(tmp_path: Path) -> None:
    made = with_fp32_weights(contents())
    directory = write_torch_dist(made, tmp_path, Options())
    key = "decoder.final_layernorm.weight"
    reader = Reader(directory)
    assert torch.equal(reader.chunk(f"optimizer.state.param.{key}", (0,)), reader.chunk(key, (0,)))
    reopened = open_torch_dist(directory, ITERATION, Options())
    assert {tensor.kind for tensor in reopened.tensors} == {
        "weight",
        "buffer",
        "exp_avg",
        "exp_avg_sq",
    }
    assert differing(made.tensors, reopened.tensors) == []


def flatten(directory: Path, name: str, original: torch.Tensor, extent: tuple[int, ...]) -> None:
    """Store a tensor as core 0.8 to 0.15 store the shards of a distributed optimizer.

    The last axis holds the elements of a box, and chunks are ranges of it; other axes count boxes.
    """
    counts = tuple(n // part for n, part in zip(original.shape, extent, strict=True))
    numel = torch.Size(extent).numel()
    chunks = []
    with changed_metadata(directory) as metadata:
        for at in itertools.product(*map(range, counts)):
            box = original
            for axis, (number, n) in enumerate(zip(at, extent, strict=True)):
                box = box.narrow(axis, number * n, n)
            for start, end in ((0, numel // 3), (numel // 3, numel)):
                offset = torch.Size((*at, start))
                file = f"flat_{len(list(directory.iterdir()))}.distcp"
                part = box.reshape(-1)[start:end].clone().view((1,) * len(counts) + (-1,))
                torch.save(part, directory / file)
                info = dataclasses.replace(next(iter(metadata.storage_data.values())))
                info.relative_path, info.offset = file, 0
                info.length = (directory / file).stat().st_size
                metadata.storage_data[MetadataIndex(name, offset)] = info
                chunks.append(ChunkStorageMetadata(offset, part.shape))
        properties = TensorProperties(dtype=original.dtype)
        size = torch.Size((*counts, numel))
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)
        metadata.mcore_data = {
            **getattr(metadata, "mcore_data", {}),
            name: {"nd_reformulated_orig_global_shape": tuple(original.shape)},
        }


def test_a_tensor_is_assembled_from_ranges_of_boxes_none_of_which_may_be_missing(
    tmp_path: Path,
) -> None:
    made = contents()
    directory = write_torch_dist(made, tmp_path, Options())
    for tensor in made.tensors:
        if tensor.kind == "exp_avg":
            name = f"optimizer.state.exp_avg.{tensor.key}"
            flatten(directory, name, whole(tensor), tensor.boxes[0][1])
    reopened = open_torch_dist(directory, ITERATION, Options())
    assert differing(made.tensors, reopened.tensors) == []
    with changed_metadata(directory) as metadata:
        lost = metadata.state_dict_metadata[name].chunks.pop()
        del metadata.storage_data[MetadataIndex(name, lost.offsets)]
    tensors = {tensor.name: tensor for tensor in open_torch_dist(directory, 0, Options()).tensors}
    with pytest.raises(CorruptCheckpointError, match=r"elements of the box at .* are missing"):
        whole(tensors[name.removeprefix("optimizer.state.").replace(".", "/", 1)])


def test_any_name_of_a_chained_optimizer_is_accepted(tmp_path: Path) -> None:
    made = contents()
    directory = write_torch_dist(made, tmp_path, Options())

    def chained(name: str) -> str:
        return f"chained_1.{name}" if name.startswith("optimizer.") else name

    with changed_metadata(directory) as metadata:
        described = metadata.state_dict_metadata
        metadata.state_dict_metadata = {chained(name): entry for name, entry in described.items()}
        metadata.storage_data = {
            MetadataIndex(chained(index.fqn), index.offset): info
            for index, info in metadata.storage_data.items()
        }
    reopened = open_torch_dist(directory, ITERATION, Options())
    assert differing(made.tensors, reopened.tensors) == []


def test_weights_alone_need_no_optimizer_state(tmp_path: Path) -> None:
    options = Options(weights_only=True)
    write_torch_dist(contents(), tmp_path / "source", Options())
    convert(
        open_source(tmp_path / "source", None, options), tmp_path / "dist", "torch_dist", options
    )
    reopened = open_source(tmp_path / "dist", None, Options()).contents
    assert {tensor.kind for tensor in reopened.tensors} == {"weight", "buffer"}
    assert reopened.optimizer is None
    assert reopened.rng == {}
    assert reopened.args.no_save_optim
    assert reopened.args.no_save_rng


def test_masters_of_untrained_norms_are_not_taken_for_low_halves(tmp_path: Path) -> None:
    """Norms of all layers are one matrix of ones before the first step that changes them."""
    made, key = contents(use_precision_aware_optimizer=True), "decoder.layers.mlp.linear_fc2.bias"
    made = with_tensor(made, f"master/{key}", torch.ones(2, 7))
    made.tensors.sort(key=lambda tensor: tensor.key != key)
    directory = write_torch_dist(made, tmp_path, Options())
    masters = {
        tensor.key: whole(tensor)
        for tensor in open_torch_dist(directory, ITERATION, Options()).tensors
        if tensor.kind == "master"
    }
    assert torch.equal(masters[key], torch.ones(2, 7))


def test_random_states_that_core_0_16_saves_by_replica_are_read(tmp_path: Path) -> None:
    """With expert parallelism their objects have an axis for the data-parallel rank."""
    made = contents()
    axes = itertools.product(range(2), range(2), range(2))
    by_replica: dict = {(pp, tp, dp): [rng(100 * dp + 10 * pp + tp)] for pp, tp, dp in axes}
    directory = write_torch_dist(dataclasses.replace(made, rng=by_replica), tmp_path, Options())
    assert same(open_torch_dist(directory, ITERATION, Options()).rng, made.rng)


def test_random_states_of_experts_have_the_keys_of_core_0_16_too(tmp_path: Path) -> None:
    sizes = {"expert_model_parallel_size": 4, "data_parallel_size": 2, "context_parallel_size": 2}
    made = contents(**sizes)
    reader = Reader(write_torch_dist(made, tmp_path, Options()))
    for (pp, tp), states in made.rng.items():
        keys = [f"{pp}.{tp}_2.2", *(f"{pp}.{tp}.{replica}_2.2.4" for replica in range(4))]
        for key in keys:
            assert same(reader.object(f"rng_state/shard_{key}"), [states])
    assert same(open_torch_dist(reader.directory, ITERATION, Options()).rng, made.rng)


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_reading_a_pickle_runs_no_code(tmp_path: Path, file: str) -> None:
    directory = write_torch_dist(contents(), tmp_path / "save", Options())
    trap = Trap(tmp_path / "sprung")
    if file == "common.pt":
        torch.save({"args": argparse.Namespace(), "trap": trap}, directory / file)
    else:
        (directory / file).write_bytes(pickle.dumps({"trap": trap}))
    with pytest.raises(UnsupportedError, match=r"pathlib.*could run code"):
        open_source(tmp_path / "save", None, Options())
    assert not (tmp_path / "sprung").exists()


def shortened(nbytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size - nbytes)


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def name_outside(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))


@pytest.mark.parametrize(
    ("name", "damage", "fact"),
    [
        ("__0_0.distcp", Path.unlink, ""),
        ("__0_0.distcp", shortened(3000), ""),
        (".metadata", shortened(20), ""),
        (".metadata", name_outside, ""),
        ("common.pt", lambda path: path.write_bytes(b"not a pickle"), ""),
        ("metadata.json", replaced_by(os.mkfifo), ": is no file, but a pipe"),
        (".metadata", replaced_by(os.mkfifo), ": is no file, but a pipe"),
        (".metadata", replaced_by(os.mkdir), ": is a directory"),
    ],
    ids=["missing", "short", "metadata", "outside", "common", "pipe", "pipe", "directory"],
)
def test_a_damaged_source_is_named_and_nothing_is_written(
    tmp_path: Path, name: str, damage: Callable[[Path], object], fact: str
) -> None:
    damage(write_torch_dist(contents(), tmp_path / "save", Options()) / name)
    before = snapshot(tmp_path)
    with pytest.raises(CorruptCheckpointError, match=f"{name}{fact}"):
        convert(
            open_source(tmp_path / "save", None, Options()),
            *(tmp_path / "ours", "flashckpt", Options()),
        )
    assert snapshot(tmp_path) == before


def test_a_directory_of_another_backend_is_refused_with_its_name(tmp_path: Path) -> None:
    directory = write_torch_dist(contents(), tmp_path, Options())
    (directory / ".metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata: is missing"):
        open_source(tmp_path, None, Options())
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UnsupportedError, match=r"stores tensors as 'zarr'.* save it as torch_dist"):
        open_source(tmp_path, None, Options())


def test_empty_and_zero_dimensional_tensors_are_converted(tmp_path: Path) -> None:
    odd = [
        held("empty", "weight", torch.zeros((0, 3)), (((0, 0), (0, 3)),)),
        held("scalar", "buffer", torch.tensor(3.5), (((), ()),)),
    ]
    made = dataclasses.replace(contents(), tensors=odd, optimizer=None)
    for to in ("torch_dist", "flashckpt"):
        write_torch_dist(made, tmp_path / "source", Options(overwrite=True))
        convert(open_source(tmp_path / "source", None, Options()), tmp_path / to, to, Options())
        reopened = open_source(tmp_path / to, None, Options()).contents.tensors
        assert torch.equal(reopened[0].read(reopened[0].boxes[0]), torch.zeros((0, 3)))
        assert float(reopened[1].read(((), ()))) == 3.5


def test_a_megatron_release_becomes_iteration_0_and_a_release_again(tmp_path: Path) -> None:
    options = Options(weights_only=True)
    directory = write_torch_dist(contents(), tmp_path / "save", options)
    directory.rename(directory.with_name("release"))
    (tmp_path / "save" / TRACKER).write_text("release")
    convert(open_source(tmp_path / "save", None, options), tmp_path / "ours", "flashckpt", options)
    opened = open_source(tmp_path / "ours", None, options)
    assert (opened.contents.iteration, opened.contents.common["iteration"]) == (0, 0)
    convert(opened, tmp_path / "back", "torch_dist", options)
    assert (tmp_path / "back" / TRACKER).read_text() == "release"
    weights = [entry for entry in contents().tensors if entry.kind in ("weight", "buffer")]
    reopened = open_source(tmp_path / "back", None, options).contents
    assert differing(weights, reopened.tensors) == []


def test_fp32_optimizer_state_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    """FP32 weights are their own masters, but the damage is in the copy that the state keeps."""
    made = with_fp32_weights(contents())
    directory = write_torch_dist(made, tmp_path / "save", Options())
    ours = tmp_path / "ours"
    convert(open_source(tmp_path / "save", None, Options()), ours, "flashckpt", Options())
    key, start = "decoder.final_layernorm.weight", torch.Size((0,))
    with changed_metadata(directory) as metadata:
        of_state = metadata.storage_data[MetadataIndex(f"optimizer.state.exp_avg.{key}", start)]
        metadata.storage_data[MetadataIndex(f"optimizer.state.param.{key}", start)] = of_state
    opened = open_source(tmp_path / "save", None, Options())
    with pytest.raises(CorruptCheckpointError, match=rf"masters of 1 tensors .* {key} \(9 of 9"):
        convert(opened, ours, "flashckpt", Options(overwrite=True))
