"""Loads of param groups and steps under another layout.

The optimizers are torch's own (one step per parameter), or a stand-in for those of Apex and
TransformerEngine (one step per group, none for an empty group). Megatron's param groups hold plain
data. Megatron's wrappers are real classes, created without their constructors, which need a GPU.
tests/integration has complete jobs.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

from megatron_flashckpt.errors import MissingStateError, UnsupportedError
from megatron_flashckpt.megatron_lm import side_state_codec
from megatron_flashckpt.megatron_lm.hyper_parameters import (
    check,
    completed,
    hyper_parameters,
    load_hyper_parameters,
    merge,
)
from megatron_flashckpt.megatron_lm.param_groups import IDENTIFIERS
from tests.simulated_gpu import simulated_gpus

Group = dict[str, Any]


class GroupStepOptimizer(torch.optim.Optimizer):
    """Optimizer that only counts steps per group, like the fused optimizers."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1


class Scaler:
    """Loss scaler with the methods that Megatron calls."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def group(
    wd_mult: float, *, expert: bool = False, lr: float = 0.0, parameters: int = 1, **more: Any
) -> Group:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(parameters)]
    identity = dict.fromkeys(IDENTIFIERS)
    identity.update(wd_mult=wd_mult, lr_mult=1.0, is_expert_parallel=expert, is_decoupled_lr=False)
    return {"params": params, **identity, "lr": lr, **more}


def wrapped(inner: torch.optim.Optimizer, scaler: Scaler | None = None) -> FP32Optimizer:
    made = FP32Optimizer.__new__(FP32Optimizer)
    made.optimizer = inner
    made.is_stub_optimizer = False
    made.config = None
    made.grad_scaler = scaler
    return made


def chained(*subs: FP32Optimizer) -> ChainedOptimizer:
    made = ChainedOptimizer.__new__(ChainedOptimizer)
    made.chained_optimizers = list(subs)
    return made


def adam(groups: list[Group]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups)


def stepped(inner: torch.optim.Optimizer, steps: int = 5) -> torch.optim.Optimizer:
    for param_group in inner.param_groups:
        for parameter in param_group["params"]:
            parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        inner.step()
    return inner


def make_one_more_step(inner: torch.optim.Optimizer) -> None:
    """Make one more step; allocate the other state before, as a load does."""
    for parameter, state in inner.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter)
    stepped(inner, 1)


def steps_of(inner: torch.optim.Optimizer) -> list[list[float | None]]:
    """Return, by group, the step of each parameter."""
    if isinstance(inner, GroupStepOptimizer):
        return [
            [param_group.get("step")] * len(param_group["params"])
            for param_group in inner.param_groups
        ]
    return [
        [float(inner.state[parameter]["step"]) for parameter in param_group["params"]]
        for param_group in inner.param_groups
    ]


def rates(inner: torch.optim.Optimizer) -> list[float]:
    return [param_group["lr"] for param_group in inner.param_groups]


@pytest.fixture(params=[adam, GroupStepOptimizer])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


# ---------------------------------------------------------------------- other layouts

Spec = dict[str, Any]
"""Arguments of `group`."""


def decayed(**more: Any) -> Spec:
    return {"wd_mult": 1.0, **more}


def plain(**more: Any) -> Spec:
    return {"wd_mult": 0.0, **more}


def experts(**more: Any) -> Spec:
    return {"wd_mult": 1.0, "expert": True, **more}


def optimizers(make: Any, subs: list[list[Spec]], *steps: int) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each list of groups, after its number of steps."""
    steps = steps or (0,) * len(subs)
    return [
        stepped(make([group(**spec) for spec in specs]), number)
        for specs, number in zip(subs, steps, strict=False)
    ]


def whole(inners: list[torch.optim.Optimizer]) -> Any:
    """Return Megatron's optimizer, which chains several."""
    subs = [wrapped(inner) for inner in inners]
    return subs[0] if len(subs) == 1 else chained(*subs)


#: By what a load does: optimizers that each rank saved (the first made 5 steps, the second 3), and
#: optimizers of the job that loads, with the rates and steps that they must have then.
LOADS: dict[str, tuple[list[list[list[Spec]]], list[list[Spec]], list[Any], list[Any]]] = {
    "two chained optimizers into one": (
        [[[decayed(lr=0.5), plain(lr=0.25)], [experts(lr=0.5)]]],
        [[decayed(parameters=3), plain()]],
        [[0.5, 0.25]],
        [[[5, 5, 5], [5]]],
    ),
    "one optimizer into two chained ones": (
        [[[decayed(lr=0.5, parameters=3), plain(lr=0.25)]]],
        [[plain(), decayed()], [experts()]],
        [[0.25, 0.5], [0.5]],
        [[[5], [5]], [[5]]],
    ),
    "experts with settings and steps of their own": (
        [[[experts(lr=0.125)], [decayed(lr=0.5)]]],
        [[decayed()], [experts()]],
        [[0.5], [0.125]],
        [[[3]], [[5]]],
    ),
    "stages with different groups": (
        [[[decayed(lr=0.5)]], [[plain(lr=0.25)]], [[decayed(lr=0.5), plain(lr=0.25)]]],
        [[plain(), decayed(parameters=2)]],
        [[0.25, 0.5]],
        [[[5], [5, 5]]],
    ),
    # With the distributed optimizer a rank may own no parameters of a group, or of an optimizer.
    "a group saved empty": (
        [[[decayed(parameters=0, lr=0.5), plain()]]],
        [[decayed(parameters=2), plain()]],
        [[0.5, 0.0]],
        [[[5, 5], [5]]],
    ),
    "an optimizer saved empty": (
        [[[decayed()], [experts(parameters=0)]]],
        [[decayed()], [experts()]],
        [[0.0], [0.0]],
        [[[5]], [[5]]],
    ),
    "a first rank without parameters": (
        [[[decayed(parameters=0)]], [[decayed()]]],
        [[decayed(), experts()]],
        [[0.0, 0.0]],
        [[[5], [5]]],
    ),
    "a last rank without parameters": (
        [[[decayed()]], [[decayed(parameters=0)]]],
        [[decayed(), experts()]],
        [[0.0, 0.0]],
        [[[5], [5]]],
    ),
    "a missing group without parameters": (
        [[[decayed(lr=0.5)]]],
        [[decayed(), {"wd_mult": 0.25, "parameters": 0, "lr": 0.125}]],
        [[0.5, 0.125]],
        [[[5], []]],
    ),
}


@pytest.mark.parametrize("saved_as", [adam, GroupStepOptimizer])
@pytest.mark.parametrize("name", LOADS)
def test_groups_take_their_rates_and_steps_under_another_layout(make, saved_as, name: str) -> None:
    """Steps per parameter and per group are converted both ways."""
    ranks, fresh, expected_rates, expected_steps = LOADS[name]
    of_ranks = [hyper_parameters(whole(optimizers(saved_as, subs, 5, 3))) for subs in ranks]
    for saved in (merge(of_ranks), *(of_ranks if len(of_ranks) == 1 else ())):
        inners = optimizers(make, fresh)
        check(whole(inners), saved)
        load_hyper_parameters(whole(inners), saved)
        assert [rates(inner) for inner in inners] == expected_rates
        assert [steps_of(inner) for inner in inners] == expected_steps
        kept = {type(g.get("step")) for inner in inners for g in inner.param_groups if g["params"]}
        assert kept == {int if make is GroupStepOptimizer else type(None)}
        # Parameters and optimizers share no step with each other or with the saved state.
        make_one_more_step(inners[0])
        further = [[step + 1 for step in steps] for steps in expected_steps[0]]
        assert [steps_of(inner) for inner in inners] == [further, *expected_steps[1:]]


def test_merging_equal_ranks_changes_nothing(make) -> None:
    saved = hyper_parameters(whole(optimizers(make, [[decayed(lr=0.5), plain()], [plain()]], 5, 5)))
    assert merge([saved, saved]) == saved
    assert len(merge([saved[:1], saved])) == 2


# ---------------------------------------------------------------------- steps


@pytest.mark.parametrize("steps", [3, 0])
def test_a_rank_without_parameters_of_an_optimizer_takes_its_step_from_others(
    make, steps: int
) -> None:
    """Ranks with parameters show also that no step was made."""

    def saved(expert_parameters: int) -> list[Group]:
        subs = [[decayed()], [experts(parameters=expert_parameters)]]
        return hyper_parameters(whole(optimizers(make, subs, 5, steps)))

    others = merge([saved(0), saved(1)])
    inners = optimizers(make, [[decayed()], [experts()]])
    load_hyper_parameters(whole(inners), completed(saved(0), others))
    assert steps_of(inners[0]) == [[5]]
    if steps or make is GroupStepOptimizer:
        assert steps_of(inners[1]) == [[steps or None]]
    else:
        assert not inners[1].state


@pytest.mark.parametrize("merged", [False, True])
def test_an_optimizer_without_steps_takes_none_from_a_chained_one(merged) -> None:
    subs = [[decayed(), plain(parameters=0)], [experts(), {**plain(), "expert": True}]]
    saved = hyper_parameters(whole(optimizers(GroupStepOptimizer, subs, 5, 0)))
    subs[0][1] = plain()
    inners = optimizers(GroupStepOptimizer, subs)
    load_hyper_parameters(whole(inners), merge([saved]) if merged else saved)
    assert [steps_of(inner) for inner in inners] == [[[5], [5]], [[None], [None]]]


def test_a_save_before_the_first_step_restores_no_step(make) -> None:
    saved = hyper_parameters(wrapped(make([group(1.0, lr=0.5)])))
    inner = make([group(1.0)])
    load_hyper_parameters(wrapped(inner), saved)
    assert rates(inner) == [0.5]
    assert not inner.state
    assert "step" not in inner.param_groups[0]


def test_parameters_of_one_optimizer_with_different_steps_are_refused() -> None:
    inner = stepped(adam([group(1.0, parameters=2)]))
    inner.state[inner.param_groups[0]["params"][1]]["step"] += 1
    remedy = "keep Megatron's own checkpointing"
    with pytest.raises(UnsupportedError, match=rf"AdamW .* steps \[5\.0, 6\.0\].*{remedy}"):
        hyper_parameters(wrapped(inner))


# ---------------------------------------------------------------------- tensors of CUDA graphs

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[None]:
    with simulated_gpus(1):
        yield


class CapturableOptimizer(GroupStepOptimizer):
    """Stand-in that keeps step and learning rate like FusedAdam of TransformerEngine and Apex."""

    def __init__(self, rate: float, *, capturable: bool = True) -> None:
        super().__init__([group(1.0, lr=rate)])
        self.capturable = capturable
        if capturable:
            (own_group,) = self.param_groups
            own_group["params"] = on_device(own_group["params"])
            own_group["lr"] = torch.tensor(rate, device=DEVICE)

    def step(self, closure: Any = None) -> None:
        (own_group,) = self.param_groups
        one: Any = 1
        if self.capturable:
            one = torch.tensor([1], dtype=torch.int, device=DEVICE)
            assert own_group["lr"].device == DEVICE
        else:
            assert type(own_group["lr"]) is float
        if "step" in own_group:
            own_group["step"] += one
        else:
            own_group["step"] = one


def on_device(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.detach().cuda() for parameter in parameters]


def counted(inner: torch.optim.Optimizer, steps: int) -> Any:
    """Return the saved hyper-parameters of `inner` after `steps` more steps."""
    for _ in range(steps):
        inner.step()
    (entry,) = hyper_parameters(wrapped(inner))
    return side_state_codec.decode(side_state_codec.encode([entry]), "the checkpoint")


@pytest.mark.parametrize("saving", [True, False], ids=["from a graph", "from no graph"])
def test_a_load_updates_the_tensors_of_a_cuda_graph_in_place(gpu: None, saving: bool) -> None:
    saved = counted(CapturableOptimizer(0.5, capturable=saving), 5)
    inner = CapturableOptimizer(0.125)
    (own_group,) = inner.param_groups
    rate = own_group["lr"]
    load_hyper_parameters(wrapped(inner), saved)
    assert own_group["lr"] is rate
    assert rate.item() == 0.5
    step = own_group["step"]
    assert (step.device, step.dtype, step.tolist()) == (DEVICE, torch.int32, [5])
    inner.step()
    assert step.tolist() == [6]
    load_hyper_parameters(wrapped(inner), saved)
    assert own_group["step"] is step
    assert (step.device, step.dtype, step.tolist()) == (DEVICE, torch.int32, [5])


def test_a_job_without_graphs_restores_graph_tensors_as_numbers(gpu: None) -> None:
    saved = counted(CapturableOptimizer(0.5), 5)
    assert isinstance(saved[0]["param_groups"][0]["step"], torch.Tensor)
    inner = CapturableOptimizer(0.125, capturable=False)
    load_hyper_parameters(wrapped(inner), saved)
    (own_group,) = inner.param_groups
    assert [(type(own_group[key]), own_group[key]) for key in ("lr", "step")] == [
        (float, 0.5),
        (int, 5),
    ]


def test_groups_do_not_share_a_step_tensor() -> None:
    saved = hyper_parameters(wrapped(stepped(GroupStepOptimizer([group(1.0)]))))
    saved[0]["param_groups"][0]["step"] = torch.tensor(5, dtype=torch.int32)
    inners = optimizers(GroupStepOptimizer, [[decayed()], [experts()]])
    load_hyper_parameters(whole(inners), saved)
    inners[0].param_groups[0]["step"].add_(1)
    assert [steps_of(inner) for inner in inners] == [[[6]], [[5]]]
    assert saved[0]["param_groups"][0]["step"] == 5


@pytest.mark.parametrize("how", ["capturable", "fused"])
def test_steps_of_torch_optimizers_are_on_the_device_of_their_kernel(gpu: None, how: str) -> None:
    inner = adam([group(1.0, parameters=2)])
    (own_group,) = inner.param_groups
    own_group["params"] = on_device(own_group["params"])
    own_group[how] = True
    tensors = []
    for number in (5, 7):
        load_hyper_parameters(wrapped(inner), counted(stepped(adam([group(1.0)]), number), 0))
        steps = [inner.state[parameter]["step"] for parameter in own_group["params"]]
        assert [(step.device, step.dtype, step.item()) for step in steps] == [
            (DEVICE, torch.float32, number)
        ] * 2
        tensors.append([*map(id, steps)])
    assert tensors[0] == tensors[1]
    assert own_group[how] is True, "a load must keep how this job computes a step"


@pytest.mark.parametrize(
    "how",
    [
        {"fused": True},
        {"capturable": True, "foreach": False},
        {"capturable": True, "foreach": False, "betas": (torch.tensor(0.75), torch.tensor(0.5))},
        {"foreach": False, "betas": (torch.tensor(0.75), torch.tensor(0.5))},
    ],
    ids=["fused", "capturable", "capturable betas", "betas"],
)
def test_torchs_adam_with_tensor_rates_continues_bit_for_bit(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda: ["cpu"])
    settings = {"lr": torch.tensor(0.5), "betas": (0.75, 0.5), **copy.deepcopy(how)}
    before = stepped(adam([group(1.0, **settings)]))
    saved = counted(before, 0)
    inner = copy.deepcopy(before)
    (own_group,) = inner.param_groups

    def tensors() -> list[torch.Tensor]:
        values = (own_group["lr"], *own_group["betas"])
        return [value for value in values if isinstance(value, torch.Tensor)]

    kept = tensors()
    steps = [state["step"] for state in inner.state.values()]
    for tensor in (*kept, *steps):
        tensor.fill_(0.125)
    load_hyper_parameters(wrapped(inner), saved)
    assert [id(tensor) for tensor in tensors()] == [id(tensor) for tensor in kept]
    assert type(own_group["betas"]) is tuple
    for _ in range(2):
        (weight,), (expected,) = (
            stepped(one, 1).param_groups[0]["params"] for one in (inner, before)
        )
        assert torch.equal(weight, expected)
    assert steps_of(inner) == [[7]]


# ---------------------------------------------------------------------- kept or refused


def test_a_load_keeps_classes_and_the_identity_of_a_group(make) -> None:
    """Megatron's optimizer for CPU offload lists classes of other optimizers."""
    saved = hyper_parameters(wrapped(stepped(make([group(1.0, lr=0.5, kind=torch.optim.AdamW)]))))
    assert "kind" not in saved[0]["param_groups"][0]
    saved[0]["param_groups"][0].update(weight_decay=0.75, foreign="also taken")
    inner = make([group(1.0, expert=True, kind=torch.optim.SGD)])
    before = dict(inner.param_groups[0])
    load_hyper_parameters(wrapped(inner), saved)
    (after,) = inner.param_groups
    for key in (*IDENTIFIERS, "params", "kind"):
        assert after[key] is before[key]
    assert (after["lr"], after["weight_decay"], after["foreign"]) == (0.5, 0.75, "also taken")


def test_identifiers_renamed_by_nemo_are_recognized(make) -> None:
    saved = hyper_parameters(wrapped(stepped(make([group(1.0, lr=0.5), group(0.0, lr=0.25)]))))
    renamed = [group(0.0), group(1.0)]
    for param_group in renamed:
        for key in ("wd_mult", "lr_mult"):
            param_group[f"pre_{key}"] = param_group.pop(key)
    inner = make(renamed)
    load_hyper_parameters(wrapped(inner), saved)
    assert rates(inner) == [0.25, 0.5]
    assert [param_group["pre_wd_mult"] for param_group in inner.param_groups] == [0.0, 1.0]


def test_an_error_names_all_missing_groups_and_changes_nothing(make) -> None:
    saved = hyper_parameters(wrapped(stepped(make([group(1.0, lr=0.5)]))))
    inner = make([group(1.0), group(0.25), group(0.75, expert=True)])
    before = copy.deepcopy([{**param_group, "params": None} for param_group in inner.param_groups])
    with pytest.raises(MissingStateError) as caught:
        check(wrapped(inner), saved)
    wanted, known = str(caught.value).split("; it has ")
    assert wanted.startswith("the checkpoint has no param group that is certainly meant for ")
    assert wanted.count("wd_mult") == 2
    assert "wd_mult 0.25" in wanted
    assert "wd_mult 0.75" in wanted
    assert "wd_mult 1.0" in known
    assert "--no-load-optim" in known
    assert [{**param_group, "params": None} for param_group in inner.param_groups] == before
    assert not inner.state


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("saved_scales", "expected"),
    [([None, 256.0], [256.0, 256.0]), ([256.0, 512.0], [256.0, 512.0])],
    ids=["one", "one per optimizer"],
)
def test_every_optimizer_with_a_scaler_restores_its_loss_scale_or_else_the_only_one(
    make, saved_scales: list[float | None], expected: list[float], merged: bool
) -> None:
    """Each chained optimizer checks its own gradients for overflows."""

    def made(scales: list[float | None]) -> ChainedOptimizer:
        inners = optimizers(make, [[decayed()], [experts()]])
        scalers = [None if scale is None else Scaler(scale) for scale in scales]
        return chained(*map(wrapped, inners, scalers))

    saved = hyper_parameters(made(saved_scales))
    loading = made([1.0, 1.0])
    load_hyper_parameters(loading, merge([saved]) if merged else saved)
    assert [sub.grad_scaler.scale for sub in loading.chained_optimizers] == expected


def test_a_foreign_optimizer_is_refused_by_name() -> None:
    """Optimizers of other projects and mocks may wrap no torch optimizer."""

    class Theirs:
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(UnsupportedError, match="optimizer Theirs is not one whose state"):
        hyper_parameters(Theirs())


def test_groups_with_equal_identity_are_matched_by_their_settings() -> None:
    def muon(momentum: float) -> torch.optim.Optimizer:
        return torch.optim.Optimizer([group(1.0, momentum=momentum)], {})

    others = optimizers(GroupStepOptimizer, [[decayed()], [experts()]], 5, 5)
    saved = hyper_parameters(whole([muon(0.9), *others]))
    fresh, momentum = GroupStepOptimizer([group(1.0)]), muon(0.5)
    load_hyper_parameters(whole([fresh, momentum]), merge([saved]))
    assert fresh.param_groups[0]["step"] == 5
    assert "momentum" not in fresh.param_groups[0]
    assert momentum.param_groups[0]["momentum"] == 0.9
    assert "step" not in momentum.param_groups[0]
