"""Saves and loads of extra states of modules and of states of random generators."""

from __future__ import annotations

import argparse
import pickle
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

from megatron_flashckpt.errors import CorruptCheckpointError, MissingStateError, UnsupportedError
from megatron_flashckpt.megatron_lm import side_state, side_state_codec
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.side_state import (
    EXTRA_STATE_NBYTES,
    encode_common,
    extra_states,
    extra_states_nbytes,
    frame,
    load_extra_states,
    load_rng_state,
    rng_state,
    unframe,
)
from tests.simulated_gpu.generators import gpu_random


class StatefulLinear(torch.nn.Linear):
    """Module with an extra state that is no tensor, like TransformerEngine's modules."""

    def __init__(self, kept: str) -> None:
        super().__init__(1, 1)
        self.kept = kept

    def get_extra_state(self) -> str:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def chunk(kept: str) -> torch.nn.Module:
    layers = [torch.nn.ModuleDict({"fc": StatefulLinear(f"{kept} {n}")}) for n in range(2)]
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers), "norm": torch.nn.Identity()})


def geometry() -> ModelGeometry:
    objects = [
        (number, f"layers.{n}.fc._extra_state", f"layers.fc._extra_state/{2 * number + n}")
        for number in range(2)
        for n in range(2)
    ]
    # Megatron also lists modules without extra state, and objects that are no modules.
    objects += [(0, "norm._extra_state", "norm"), (0, "layers.9.fc._extra_state", "gone")]
    objects += [(1, "layers.0.fc.other", "other"), (1, "_extra_state", "chunk")]
    return ModelGeometry((), [], [], objects)


def test_extra_states_are_restored_by_global_name() -> None:
    chunks = [chunk("first"), chunk("second")]
    saved = extra_states(chunks, geometry())
    assert saved == {
        "layers.fc._extra_state/0": "first 0",
        "layers.fc._extra_state/1": "first 1",
        "layers.fc._extra_state/2": "second 0",
        "layers.fc._extra_state/3": "second 1",
    }
    others = [chunk("third"), chunk("fourth")]
    load_extra_states(others, geometry(), saved)
    assert extra_states(others, geometry()) == saved
    of_chunk = ModelGeometry((), [], [], [(0, "_extra_state", "chunk")])
    assert extra_states([StatefulLinear("whole")], of_chunk) == {"chunk": "whole"}


class Experts(StatefulLinear):
    """Grouped experts like Megatron's TEGroupedLinear: one state, named after the first expert."""

    def __init__(self, num_gemms: int, scale: float) -> None:
        super().__init__("")
        self.num_gemms = num_gemms
        state = {
            "extra_fp8_variables": {"num_gemms": num_gemms},
            "scale_fwd": torch.full((3 * num_gemms,), scale),
        }
        self.kept = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def _decode_extra_state(self, state: torch.Tensor) -> Any:
        return pickle.loads(state.numpy().tobytes()) if state.numel() else None


def experts(num_gemms: int, scale: float) -> tuple[list[torch.nn.Module], ModelGeometry]:
    """Return a model of two layers of experts, and its geometry for any number of ranks."""
    layers = [Experts(num_gemms, scale), Experts(num_gemms, 2 * scale)]
    first = [(0, f"{n}._extra_state", f"{n}._extra_state/shard_0_8") for n in range(2)]
    others = [
        (0, f"{n}._extra_state{gemm}", f"{n}._extra_state/shard_{gemm}_8")
        for n in range(2)
        for gemm in range(1, num_gemms)
    ]
    return [torch.nn.Sequential(*layers)], ModelGeometry((), [], [], [*first, *others])


def scales(chunks: list[torch.nn.Module]) -> list[list[float]]:
    return [
        module._decode_extra_state(module.kept)["scale_fwd"].tolist()
        for module in chunks[0].children()
    ]


def test_grouped_experts_restore_their_state(caplog: pytest.LogCaptureFixture) -> None:
    saved = extra_states(*experts(2, 0.5))
    chunks, geometry = experts(2, 8.0)
    load_extra_states(chunks, geometry, saved)
    assert scales(chunks) == [[0.5] * 6, [1.0] * 6]
    load_extra_states(chunks, geometry, {name: torch.empty(0) for name in saved})
    assert [module.kept.numel() for module in chunks[0].children()] == [0, 0], (
        "a state saved without FP8 is not empty"
    )
    assert caplog.messages == []


@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 4), (2, 1), (1, 2)])
def test_grouped_experts_refuse_the_state_of_another_number_of_experts(
    saving: int, loading: int, caplog: pytest.LogCaptureFixture
) -> None:
    chunks, geometry = experts(loading, 8.0)
    load_extra_states(chunks, geometry, extra_states(*experts(saving, 0.5)))
    assert scales(chunks) == [[8.0] * 3 * loading, [16.0] * 3 * loading]
    assert caplog.messages == [
        "2 modules of grouped experts keep their present FP8 state, because the checkpoint was "
        "saved under another expert parallel size, with another number of experts per rank: "
        "0._extra_state/shard_0_8, 1._extra_state/shard_0_8"
    ]


# ---------------------------------------------------------------------- random states

NAMES = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")
PLACE = "iter_0000007/rank_00000"


@pytest.fixture
def gpu() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), gpu_random():
        yield


def seed(number: int, *, graph_safe: bool) -> Any:
    """Create Megatron's tracker: with Generators if `graph_safe`, else with tensors."""
    tensor_parallel.model_parallel_cuda_manual_seed(
        number,
        use_cudagraphable_rng=graph_safe,
        tp_rank=0,
        ep_rank=0,
        etp_rank=0,
        force_reset_rng=True,
    )
    return tensor_parallel.get_cuda_rng_tracker()


def drawn() -> torch.Tensor:
    """Return the next numbers of each generator of the tracker, and of the default generator."""
    numbers = [torch.rand(5)]
    for name in NAMES:
        with tensor_parallel.get_cuda_rng_tracker().fork(name):
            numbers.append(torch.rand(5))
    return torch.stack(numbers)


def saved_and_read(rng: Any) -> Any:
    state = {"rng": rng, "optimizer": [], "rerun": None, "objects": {}}
    return unframe(frame(state, 0, 1).tensor.numpy().tobytes(), PLACE)["rng"]


@pytest.mark.parametrize("loading", [False, True], ids=["to tensors", "to generators"])
@pytest.mark.parametrize("saving", [False, True], ids=["tensors", "generators"])
def test_every_generator_of_the_tracker_continues_after_a_load(
    gpu: None, saving: bool, loading: bool
) -> None:
    tracker = seed(7, graph_safe=saving)
    assert {type(state) for state in tracker.get_states().values()} == {
        torch.Generator if saving else torch.Tensor
    }
    drawn()
    saved = rng_state()  # which does not change with the tracker
    expected = [drawn(), drawn()]
    tracker = seed(8, graph_safe=loading)
    assert not torch.equal(drawn(), expected[0])
    registered = tracker.get_states()
    load_rng_state(saved_and_read(saved))
    assert torch.equal(drawn(), expected[0])
    assert torch.equal(drawn(), expected[1])
    restored = tracker.get_states()
    assert list(restored) == list(registered)
    assert {type(state) for state in restored.values()} == {
        torch.Generator if loading else torch.Tensor
    }
    # CUDA graphs have registered the generators.
    assert not loading or all(restored[name] is registered[name] for name in restored)


@pytest.mark.parametrize("graph_safe", [False, True])
def test_a_load_adds_a_missing_generator_to_the_tracker(gpu: None, graph_safe: bool) -> None:
    tracker = seed(7, graph_safe=graph_safe)
    read = saved_and_read(rng_state())
    expected = drawn()
    tracker.set_states({NAMES[0]: tracker.get_states()[NAMES[0]]})
    load_rng_state(read)
    assert torch.equal(drawn(), expected)


@pytest.mark.parametrize("graph_safe", [False, True])
def test_a_generator_unknown_to_the_saving_release_keeps_its_seed(
    gpu: None, graph_safe: bool, caplog: pytest.LogCaptureFixture
) -> None:
    seed(7, graph_safe=graph_safe)
    read = saved_and_read(rng_state())
    expected = drawn()
    seed(8, graph_safe=graph_safe)
    fresh = drawn()
    seed(8, graph_safe=graph_safe)
    del read["rng_tracker_states"][NAMES[0]]
    load_rng_state(read)
    numbers = drawn()
    assert torch.equal(numbers[1], fresh[1])
    assert torch.equal(numbers[[0, 2, 3]], expected[[0, 2, 3]])
    assert [record.message for record in caplog.records if record.name == side_state.__name__] == [
        "the checkpoint has no state of the random generator data-parallel-rng, which keeps the "
        "state that this job's seed gave it"
    ]


@pytest.mark.parametrize("graph_safe", [False, True])
def test_a_tracker_with_generators_refuses_a_checkpoint_without_generators(
    gpu: None, graph_safe: bool
) -> None:
    seed(7, graph_safe=graph_safe)
    read = saved_and_read(rng_state())
    before = drawn()
    read["rng_tracker_states"] = {}
    seed(7, graph_safe=graph_safe)
    with pytest.raises(MissingStateError) as refused:
        load_rng_state(read)
    assert str(refused.value) == (
        "the checkpoint has no state of the random generators data-parallel-rng, "
        "model-parallel-rng, expert-parallel-rng, which this job uses; add --no-load-rng to keep "
        "the states that this job's seed gave them"
    )
    assert torch.equal(drawn(), before)


def test_a_tracker_without_generators_accepts_a_checkpoint_without_generators(gpu: None) -> None:
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    load_rng_state(saved_and_read(rng_state()))
    assert tensor_parallel.get_cuda_rng_tracker().get_states() == {}


def test_a_load_logs_the_values_that_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    """Classes may not be imported, and earlier releases saved a `repr` of some values."""
    tag = "__flashckpt__"
    optimizer = [
        {tag: "enum", "class": "no_such.module:Kind", "value": "ONE"},
        {tag: "repr", "value": "<torch._C.Generator object at 0x7f00e5539bf0>"},
        {"a": {tag: "of a newer release"}, "b": msgspec.msgpack.Ext(5, b""), "c": 1},
        {tag: "dtype", "value": "torch.float1"},
        {tag: "tuple", "value": [{tag: 7}]},
    ]
    state = {"rng": None, "optimizer": optimizer, "rerun": None, "objects": {}}
    encoded = msgspec.msgpack.encode(state)
    framed = len(encoded).to_bytes(8, "little") + encoded
    assert unframe(framed, PLACE)["optimizer"] == [{"c": 1}, ()]
    assert caplog.messages == [
        f"{PLACE}: the load leaves out side state that this process cannot restore: "
        "optimizer[0] (no_such.module.Kind), optimizer[1] (repr), optimizer[2].a (of a newer "
        "release), optimizer[2].b (MessagePack extension 5), optimizer[3] (dtype), "
        "optimizer[4][0] (unknown)"
    ]


# ---------------------------------------------------------------------- common state of all ranks


def test_only_megatrons_args_may_hold_values_without_a_plain_form() -> None:
    args = argparse.Namespace(provider=len, lr=0.5)
    common = {"args": args, "iteration": 7, "opt_param_scheduler": {"num_steps": 3}}
    assert side_state_codec.decode(encode_common(common), PLACE) == {
        **common,
        "args": argparse.Namespace(lr=0.5),
    }
    common["opt_param_scheduler"] = {"num_steps": 3, "warmup": len}
    with pytest.raises(
        UnsupportedError, match=r"state: opt_param_scheduler\.warmup \(builtin_function"
    ):
        encode_common(common)


class QuantizedLinear(torch.nn.Linear):
    """Module like TransformerEngine's under FP8, whose state is created by the first step.

    The state holds the module's history of absolute maxima, 5 numbers per step and matrix.
    """

    def __init__(self, history: int, num_gemms: int = 1) -> None:
        super().__init__(1, 1)
        self.num_gemms = num_gemms
        self.has_stepped = False
        self._state_nbytes = 2048 + 20 * history * num_gemms

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(self._state_nbytes if self.has_stepped else 0, dtype=torch.uint8)


@pytest.mark.parametrize("layers", [2, 60])
@pytest.mark.parametrize("history", [None, 1, 1024])
@pytest.mark.parametrize("num_gemms", [1, 8])
def test_the_estimate_covers_extra_states_created_by_the_first_step(
    layers: int, history: int | None, num_gemms: int
) -> None:
    modules = torch.nn.ModuleList(QuantizedLinear(history or 1, num_gemms) for _ in range(layers))
    only = torch.nn.ModuleDict({"layers": modules})
    if history is not None:
        only.config = types.SimpleNamespace(fp8="hybrid", fp8_amax_history_len=history)
    objects = [(0, f"layers.{n}._extra_state", f"layers._extra_state/{n}") for n in range(layers)]
    here = ModelGeometry((), [], [], objects)
    room = extra_states_nbytes([only], here)
    for module in modules:
        module.has_stepped = True
    after = len(side_state_codec.encode(extra_states([only], here)))
    assert after <= room
    assert room <= after + layers * (EXTRA_STATE_NBYTES + 256)
    assert extra_states_nbytes([only], here) >= after, (
        "the estimate is too small once the states exist"
    )


@pytest.mark.parametrize("precision", [{}, {"fp8": None}, {"fp8": "e4m3"}, {"fp4": "e2m1"}])
def test_the_estimate_covers_a_none_state_only_if_the_job_quantizes(
    precision: dict[str, str | None],
) -> None:
    """Megatron's linear layers have such a state, and others before they use FP8."""

    class StatelessLinear(torch.nn.Linear):
        def get_extra_state(self) -> None:
            return None

    only = torch.nn.ModuleDict({"layer": StatelessLinear(1, 1), "norm": torch.nn.Identity()})
    only.config = types.SimpleNamespace(**precision)
    objects = [(0, f"{name}._extra_state", f"{name}._extra_state") for name in ("layer", "norm")]
    room = extra_states_nbytes([only], ModelGeometry((), [], [], objects))
    if any(precision.values()):
        assert EXTRA_STATE_NBYTES < room < 2 * EXTRA_STATE_NBYTES
    else:
        assert room == 0


def test_common_state_of_an_own_loop_is_refused_by_name_where_args_are_needed() -> None:
    job = JobState(chunks=[], common={side_state.OWN_STATE: {"samples": 7}})
    encoded = side_state.encode_common(side_state.common_state(job, 3))
    state = side_state.decode_common(encoded, "common", side_state.COMMON_STATE)
    assert (state["iteration"], state["side"]) == (3, {"samples": 7})
    with pytest.raises(UnsupportedError, match=r"common: megatron_flashckpt\.Checkpointer"):
        side_state.decode_common(encoded, "common", side_state.MEGATRON_STATE)
    with pytest.raises(CorruptCheckpointError, match="lacks checkpoint_version"):
        side_state.decode_common(side_state.encode_common({}), "common", side_state.COMMON_STATE)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_only_a_step_to_rerun_has_a_state_to_save(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no save after the loop is a repetition on core 0.19, whose state is never None."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(side_state, "feature", lambda name: lambda: machine)
    assert side_state.rerun_state(None) is None
    machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    state = side_state.rerun_state(None)
    assert machine.validate_state_dict(state)
    assert (
        "rerun_requested"
        in side_state_codec.decode(side_state_codec.encode(state), "rank 0")["sharded"]
    )
