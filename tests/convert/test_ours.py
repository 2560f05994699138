"""Our format as source and destination of a conversion, without Megatron and without ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import choose
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import open_source
from megatron_flashckpt.convert.readers.flashckpt import open_ours
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.errors import CorruptCheckpointError, OtherWriterError
from megatron_flashckpt.file_format.file_names import RUNS, TRACKER, parse_save
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.cli.conftest import keep_alive, sign_of
from tests.convert.made import ITERATION, contents, differing, save_as_ranks, whole
from tests.support.checkpoints import snapshot
from tests.support.megatron_jobs import same


def test_a_written_checkpoint_is_intact_and_read_back_bit_for_bit(tmp_path: Path) -> None:
    made = contents()
    directory = write_ours(made, tmp_path, Options(shard_nbytes=1000))
    stored = open_checkpoint(PosixStore(tmp_path), ITERATION)
    assert verify(stored) == []
    places = {(shard.coordinates.pp, shard.coordinates.tp) for shard in stored.manifest.shards}
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}, "a rank at each place finds its state"
    reopened = open_ours(PosixStore(tmp_path), ITERATION, Options())
    assert differing(made.tensors, reopened.tensors) == []
    assert [tensor.boxes for tensor in reopened.tensors] == [
        tensor.boxes for tensor in made.tensors
    ]
    assert vars(reopened.args) == vars(made.args)
    assert {**reopened.common, "args": 0} == {**made.common, "args": 0}
    groups = [group for entry in reopened.optimizer for group in entry["param_groups"]]
    assert groups == made.optimizer[0]["param_groups"]
    assert same(reopened.rng, made.rng)
    assert same(reopened.objects, made.objects)
    assert len(list(directory.glob("*.safetensors"))) > 4
    assert (tmp_path / TRACKER).read_text() == str(ITERATION)


def test_a_release_of_ours_converts_under_the_iteration_that_it_holds(tmp_path: Path) -> None:
    made = contents()
    directory = write_ours(made, tmp_path, Options())
    directory.rename(directory.with_name("release"))
    (tmp_path / TRACKER).write_text("release")
    reopened = open_source(tmp_path, None, Options())
    assert (reopened.format, reopened.contents.iteration) == ("flashckpt", ITERATION)
    assert differing(made.tensors, reopened.contents.tensors) == []


def test_every_replica_keeps_its_own_random_state(tmp_path: Path) -> None:
    made = contents(data_parallel_random_init=True)
    states = {place: [*of_place, {"mark": place}] for place, of_place in made.rng.items()}
    write_ours(dataclasses.replace(made, rng=states), tmp_path, Options(shard_nbytes=500))
    reopened = open_ours(PosixStore(tmp_path), ITERATION, Options())
    assert same({place: of_place[:2] for place, of_place in reopened.rng.items()}, states)


def test_files_of_differing_replicas_have_the_coordinates_of_megatrons_ranks(
    tmp_path: Path,
) -> None:
    layout = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    }
    replicas, world_size = 2, 16
    expected = set()
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
            expected.add(parallel.coordinates())
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    made = contents(data_parallel_random_init=True)
    vars(made.args).update(layout)
    states = {place: of_place * replicas for place, of_place in made.rng.items()}
    write_ours(dataclasses.replace(made, rng=states), tmp_path, Options())
    store = PosixStore(tmp_path)
    stored = open_checkpoint(store, ITERATION)
    assert {shard.coordinates for shard in stored.manifest.shards} == expected


@pytest.mark.parametrize("memory_nbytes", [1, 2**30])
def test_boxes_and_regions_across_them_are_assembled_from_the_shards_of_all_ranks(
    tmp_path: Path, memory_nbytes: int
) -> None:
    made = contents()
    save_as_ranks(made, tmp_path, replicas=7)
    reopened = open_ours(PosixStore(tmp_path), ITERATION, Options(memory_nbytes=memory_nbytes))
    assert differing(made.tensors, reopened.tensors) == []
    for tensor in reopened.tensors:
        shape = tuple(max(n - 2, 1) for n in tensor.shape)
        offset = tuple(min(1, n - extent) for n, extent in zip(tensor.shape, shape, strict=True))
        ranges = zip(offset, shape, strict=True)
        expected = whole(tensor)[tuple(slice(low, low + n) for low, n in ranges)]
        assert torch.equal(tensor.read((offset, shape)), expected), tensor.name


def test_a_cached_chunk_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as_ranks(contents(), tmp_path, replicas=3)
    reads: Counter[tuple[int, int]] = Counter()
    chunk = StoredCheckpoint.chunk

    def counting(self, shard, index, *rest):
        reads[shard.metadata.rank, index] += 1
        return chunk(self, shard, index, *rest)

    monkeypatch.setattr(StoredCheckpoint, "chunk", counting)
    first, *_, last = open_ours(PosixStore(tmp_path), ITERATION, Options()).tensors
    for _ in range(5):
        whole(first), whole(last)
    assert set(reads.values()) == {1}
    options = Options(memory_nbytes=1)
    first, *_, last = open_ours(PosixStore(tmp_path), ITERATION, options).tensors
    for _ in range(5):
        whole(first), whole(last)
    assert max(reads.values()) > 5


def test_a_failed_conversion_leaves_no_files(tmp_path: Path) -> None:
    made = contents()
    last = made.tensors[-1]

    def fail(box):
        raise CorruptCheckpointError("the source is damaged")

    broken = [*made.tensors[:-1], dataclasses.replace(last, read=fail)]
    write_ours(contents(seed=1), tmp_path, Options())

    def files() -> dict[str, tuple[object, ...]]:
        """Return the files; the directory of the runs' objects has held one for a moment."""
        return {name: entry for name, entry in snapshot(tmp_path).items() if name != RUNS}

    before = files()
    for options in (Options(overwrite=True), Options(overwrite=True, shard_nbytes=100)):
        with pytest.raises(CorruptCheckpointError, match="the source is damaged"):
            write_ours(dataclasses.replace(made, tensors=broken), tmp_path, options)
        assert files() == before


def test_conversions_into_one_directory_all_count(tmp_path: Path) -> None:
    for iteration in (10, 30, 20):
        write_ours(dataclasses.replace(contents(), iteration=iteration), tmp_path, Options())
    candidates = choose(read_facts(PosixStore(tmp_path))).candidates
    assert [candidate.save.iteration for candidate in candidates] == [30, 20, 10]
    runs = [parse_save(candidate.save.save_id) for candidate in candidates]
    assert [run.number for run in runs if run] == [2, 3, 1]
    assert (tmp_path / TRACKER).read_text() == "30"


@pytest.mark.parametrize(
    ("state", "doing"),
    [("training", "trains and saves there"), ("finishing", "still writes staged saves")],
)
def test_a_conversion_into_the_directory_of_a_live_job_or_agent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, doing: str
) -> None:
    """The saves that it writes would not count any more."""
    keep_alive(monkeypatch, tmp_path, sign_of("000001-aaaa", state=state))
    before = snapshot(tmp_path)
    with pytest.raises(OtherWriterError, match=rf"000001-aaaa .* {doing}"):
        write_ours(contents(), tmp_path, Options())
    assert snapshot(tmp_path) == before
