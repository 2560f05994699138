"""Loads of param groups and steps under another layout.

The optimizers are torch's own (one step per parameter), or a stand-in for those of Apex and
TransformerEngine (one step per group, none for an empty group). Megatron's param groups hold plain
data. Megatron's wrappers are real classes, created without their constructors, which need a GPU.
tests/integration has complete jobs.
"""

from __future__ import annotations

import copy
import importlib
import itertools
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


def group(wd_mult: float, *, expert: bool = False, lr: float = 0.0, parameters: int = 1) -> Group:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(parameters)]
    identity = dict.fromkeys(IDENTIFIERS)
    identity.update(wd_mult=wd_mult, lr_mult=1.0, is_expert_parallel=expert, is_decoupled_lr=False)
    return {"params": params, **identity, "lr": lr}


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


def test_two_chained_optimizers_are_loaded_into_one(make) -> None:
    dense = stepped(make([group(1.0, lr=0.5), group(0.0, lr=0.25)]))
    experts = stepped(make([group(1.0, expert=True, lr=0.5)]))
    saved = hyper_parameters(chained(wrapped(dense), wrapped(experts)))
    assert len(saved) == 2
    inner = make([group(1.0, parameters=3), group(0.0)])
    load_hyper_parameters(wrapped(inner), saved)
    assert rates(inner) == [0.5, 0.25]
    assert steps_of(inner) == [[5, 5, 5], [5]]


def test_one_optimizer_is_loaded_into_two_chained_ones(make) -> None:
    saved = hyper_parameters(
        wrapped(stepped(make([group(1.0, lr=0.5, parameters=3), group(0.0, lr=0.25)])))
    )
    dense, experts = make([group(1.0), group(0.0)]), make([group(1.0, expert=True)])
    load_hyper_parameters(chained(wrapped(dense), wrapped(experts)), saved)
    assert (rates(dense), rates(experts)) == ([0.5, 0.25], [0.5])
    assert (steps_of(dense), steps_of(experts)) == ([[5], [5]], [[5]])
    # The optimizers share no step with each other or with the saved state.
    make_one_more_step(dense)
    assert (steps_of(dense), steps_of(experts)) == ([[6], [6]], [[5]])


def test_experts_with_their_own_settings_restore_those(make) -> None:
    dense = stepped(make([group(1.0, lr=0.5)]))
    experts = stepped(make([group(1.0, expert=True, lr=0.125)]))
    saved = hyper_parameters(chained(wrapped(dense), wrapped(experts)))
    saved.reverse()
    dense, experts = make([group(1.0)]), make([group(1.0, expert=True)])
    load_hyper_parameters(chained(wrapped(dense), wrapped(experts)), saved)
    assert (rates(dense), rates(experts)) == ([0.5], [0.125])


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_groups_are_matched_by_identity_in_any_order(make, order) -> None:
    def fresh(lrs: tuple[float, float, float]) -> list[Group]:
        return [
            group(1.0, lr=lrs[0]),
            group(0.0, lr=lrs[1]),
            group(0.0, lr=lrs[2]) | {"is_decoupled_lr": True},
        ]

    saved = hyper_parameters(wrapped(stepped(make(fresh((1.0, 2.0, 3.0))))))
    fresh_groups = fresh((0.0, 0.0, 0.0))
    inner = make([fresh_groups[n] for n in order])
    load_hyper_parameters(wrapped(inner), saved)
    assert rates(inner) == [float(n + 1) for n in order]
    assert [param_group["wd_mult"] for param_group in inner.param_groups] == [
        fresh_groups[n]["wd_mult"] for n in order
    ]


def test_merged_stages_have_the_groups_of_all_stages(make) -> None:
    """Stage 0 saved only the group with weight decay, stage 1 only the other group."""
    of_ranks = [
        hyper_parameters(wrapped(stepped(make([group(1.0, lr=0.5)])))),
        hyper_parameters(wrapped(stepped(make([group(0.0, lr=0.25)])))),
        hyper_parameters(wrapped(stepped(make([group(1.0, lr=0.5), group(0.0, lr=0.25)])))),
    ]
    merged = merge(of_ranks)
    assert sum(len(entry["param_groups"]) for entry in merged) == 2
    inner = make([group(0.0), group(1.0, parameters=2)])
    load_hyper_parameters(wrapped(inner), merged)
    assert rates(inner) == [0.25, 0.5]
    assert steps_of(inner) == [[5], [5, 5]]


def test_merging_equal_ranks_changes_nothing(make) -> None:
    inner = stepped(make([group(1.0, lr=0.5), group(0.0, lr=0.25)]))
    saved = hyper_parameters(chained(wrapped(inner), wrapped(stepped(make([group(0.0)])))))
    assert merge([saved, saved]) == saved


# ---------------------------------------------------------------------- steps


def test_a_group_saved_empty_takes_the_step_of_the_other_groups(make) -> None:
    """With the distributed optimizer a rank may own no parameters of a group."""
    saved = hyper_parameters(wrapped(stepped(make([group(1.0, parameters=0, lr=0.5), group(0.0)]))))
    inner = make([group(1.0, parameters=2), group(0.0)])
    load_hyper_parameters(wrapped(inner), saved)
    assert rates(inner) == [0.5, 0.0]
    assert steps_of(inner) == [[5, 5], [5]]


@pytest.mark.parametrize("empty_first", [True, False])
def test_a_rank_without_parameters_does_not_hide_the_steps_of_others(make, empty_first) -> None:
    of_ranks = [
        hyper_parameters(wrapped(stepped(make([group(1.0, parameters=0)])))),
        hyper_parameters(wrapped(stepped(make([group(1.0)])))),
    ]
    inner = make([group(1.0), group(1.0, expert=True)])
    load_hyper_parameters(wrapped(inner), merge(of_ranks if empty_first else of_ranks[::-1]))
    assert steps_of(inner) == [[5], [5]]


@pytest.mark.parametrize("merged", [False, True])
def test_chained_optimizers_keep_their_own_step(make, merged: bool) -> None:
    saved = hyper_parameters(
        chained(
            wrapped(stepped(make([group(1.0), group(0.0)]), 5)),
            wrapped(stepped(make([group(1.0, expert=True)]), 3)),
        )
    )
    dense, experts = make([group(1.0), group(0.0)]), make([group(1.0, expert=True)])
    load_hyper_parameters(
        chained(wrapped(dense), wrapped(experts)), merge([saved]) if merged else saved
    )
    assert (steps_of(dense), steps_of(experts)) == ([[5], [5]], [[3]])


@pytest.mark.parametrize("merged", [False, True])
def test_an_optimizer_without_steps_takes_none_from_a_chained_one(merged) -> None:
    saved = hyper_parameters(
        chained(
            # A rank may own no parameters of a group; then the group has no step on that rank.
            wrapped(stepped(GroupStepOptimizer([group(1.0), group(0.0, parameters=0)]))),
            wrapped(GroupStepOptimizer([group(1.0, expert=True), group(0.0, expert=True)])),
        )
    )
    dense = GroupStepOptimizer([group(1.0), group(0.0)])
    experts = GroupStepOptimizer([group(1.0, expert=True), group(0.0, expert=True)])
    load_hyper_parameters(
        chained(wrapped(dense), wrapped(experts)), merge([saved]) if merged else saved
    )
    assert (steps_of(dense), steps_of(experts)) == ([[5], [5]], [[None], [None]])


def test_ranks_with_parameters_show_that_no_step_was_made() -> None:
    def saved(expert_parameters: int) -> list[Group]:
        dense = stepped(GroupStepOptimizer([group(1.0)]))
        experts = GroupStepOptimizer([group(1.0, expert=True, parameters=expert_parameters)])
        return hyper_parameters(chained(wrapped(dense), wrapped(experts)))

    dense, experts = GroupStepOptimizer([group(1.0)]), GroupStepOptimizer([group(1.0, expert=True)])
    others = merge([saved(0), saved(1)])
    load_hyper_parameters(chained(wrapped(dense), wrapped(experts)), completed(saved(0), others))
    assert (steps_of(dense), steps_of(experts)) == ([[5]], [[None]])


def test_an_optimizer_without_saved_parameters_takes_the_step_of_the_other(
    make,
) -> None:
    saved = hyper_parameters(
        chained(
            wrapped(stepped(make([group(1.0)]))),
            wrapped(stepped(make([group(1.0, expert=True, parameters=0)]))),
        )
    )
    dense, experts = make([group(1.0)]), make([group(1.0, expert=True)])
    load_hyper_parameters(chained(wrapped(dense), wrapped(experts)), merge([saved]))
    assert (steps_of(dense), steps_of(experts)) == ([[5]], [[5]])


def test_a_rank_without_parameters_of_an_optimizer_takes_its_step_from_others(make) -> None:
    def saved(expert_parameters: int) -> list[Group]:
        dense = stepped(make([group(1.0, lr=0.5)]), 5)
        experts = stepped(make([group(1.0, expert=True, parameters=expert_parameters)]), 3)
        return hyper_parameters(chained(wrapped(dense), wrapped(experts)))

    others = merge([saved(0), saved(1)])
    dense, experts = make([group(1.0)]), make([group(1.0, expert=True)])
    load_hyper_parameters(chained(wrapped(dense), wrapped(experts)), completed(saved(0), others))
    assert (steps_of(dense), steps_of(experts)) == ([[5]], [[3]])


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"), [(adam, GroupStepOptimizer), (GroupStepOptimizer, adam)]
)
def test_steps_per_parameter_and_per_group_convert_both_ways(saved_as, loaded_as) -> None:
    saved = hyper_parameters(wrapped(stepped(saved_as([group(1.0), group(0.0)]))))
    inner = loaded_as([group(1.0, parameters=2), group(0.0)])
    load_hyper_parameters(wrapped(inner), saved)
    assert steps_of(inner) == [[5, 5], [5]]
    if loaded_as is GroupStepOptimizer:
        assert {type(param_group["step"]) for param_group in inner.param_groups} == {int}
    else:
        assert all("step" not in param_group for param_group in inner.param_groups)
    make_one_more_step(inner)
    assert steps_of(inner) == [[6, 6], [6]]


def test_every_parameter_has_its_own_step_tensor() -> None:
    saved = hyper_parameters(wrapped(stepped(adam([group(1.0), group(0.0)]))))
    inner = adam([group(1.0, parameters=3), group(0.0, parameters=2)])
    load_hyper_parameters(wrapped(inner), saved)
    pointers = {state["step"].data_ptr() for state in inner.state.values()}
    assert len(pointers) == 5
    assert {state["step"].dtype for state in inner.state.values()} == {torch.float32}


def test_groups_do_not_share_a_step_tensor() -> None:
    """Optimizers that CUDA graphs can capture keep the step in a tensor."""
    saved = hyper_parameters(wrapped(stepped(GroupStepOptimizer([group(1.0)]))))
    saved[0]["param_groups"][0]["step"] = torch.tensor(5, dtype=torch.int32)
    dense, experts = GroupStepOptimizer([group(1.0)]), GroupStepOptimizer([group(1.0, expert=True)])
    load_hyper_parameters(chained(wrapped(dense), wrapped(experts)), saved)
    dense.param_groups[0]["step"].add_(1)
    assert (steps_of(dense), steps_of(experts)) == ([[6]], [[5]])
    assert saved[0]["param_groups"][0]["step"] == 5


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


class DeviceTensor(torch.Tensor):
    """Tensor on a simulated GPU: only `copy_` accepts a CPU tensor as well."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == torch.Tensor.device.__get__:
            return DEVICE
        others = [
            argument
            for argument in args
            if isinstance(argument, torch.Tensor) and not isinstance(argument, cls)
        ]
        if others and function is not torch.Tensor.copy_:
            raise RuntimeError(f"{function}: expected all tensors to be on the same device")
        made = super().__torch_function__(function, types, args, kwargs or {})
        return made.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else made


class Gpu(torch.overrides.TorchFunctionMode):
    """Mode in which tensors are created on the simulated GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        to_device = function is torch.Tensor.to and DEVICE in args
        if to_device or kwargs.get("device") == DEVICE:
            kwargs.pop("device", None)
            args = tuple(argument for argument in args if argument != DEVICE) if to_device else args
            made = args[0].clone() if to_device else function(*args, **kwargs)
            return made.as_subclass(DeviceTensor)
        return function(*args, **kwargs)


class CapturableOptimizer(GroupStepOptimizer):
    """Stand-in that keeps step and learning rate like FusedAdam of TransformerEngine and Apex."""

    def __init__(self, groups: list[Group], *, capturable: bool = True) -> None:
        super().__init__(groups)
        self.capturable = capturable
        for param_group in self.param_groups if capturable else ():
            param_group["params"] = [
                tensor.as_subclass(DeviceTensor) for tensor in param_group["params"]
            ]
            param_group["lr"] = torch.tensor(param_group["lr"]).as_subclass(DeviceTensor)

    def step(self, closure: Any = None) -> None:
        with Gpu():
            for param_group in self.param_groups:
                one: Any = 1
                if self.capturable:
                    one = torch.tensor([1], dtype=torch.int, device=DEVICE)
                    assert param_group["lr"].device == DEVICE
                else:
                    assert type(param_group["lr"]) is float
                if "step" in param_group:
                    param_group["step"] += one
                else:
                    param_group["step"] = one


def loaded(inner: torch.optim.Optimizer, saved: Any) -> torch.optim.Optimizer:
    with Gpu():
        load_hyper_parameters(wrapped(inner), saved)
    return inner


def counted(inner: torch.optim.Optimizer, steps: int) -> Any:
    """Return the saved hyper-parameters of `inner` after `steps` more steps."""
    for _ in range(steps):
        inner.step()
    (entry,) = hyper_parameters(wrapped(inner))
    return side_state_codec.decode(side_state_codec.encode([entry]), "the checkpoint")


@pytest.mark.parametrize("saving", [True, False], ids=["from a graph", "from no graph"])
def test_a_load_updates_the_tensors_of_a_cuda_graph_in_place(saving: bool) -> None:
    saved = counted(CapturableOptimizer([group(1.0, lr=0.5)], capturable=saving), 5)
    inner = CapturableOptimizer([group(1.0, lr=0.125)])
    (own_group,) = inner.param_groups
    rate = own_group["lr"]
    loaded(inner, saved)
    assert own_group["lr"] is rate
    assert torch.equal(rate.as_subclass(torch.Tensor), torch.tensor(0.5))
    step = own_group["step"]
    assert (step.device, step.dtype, step.tolist()) == (DEVICE, torch.int32, [5])
    inner.step()
    assert step.tolist() == [6]
    loaded(inner, saved)
    assert own_group["step"] is step
    assert (step.device, step.dtype, step.tolist()) == (DEVICE, torch.int32, [5])


def test_a_job_without_graphs_restores_graph_tensors_as_numbers() -> None:
    saved = counted(CapturableOptimizer([group(1.0, lr=0.5)]), 5)
    assert isinstance(saved[0]["param_groups"][0]["step"], torch.Tensor)
    inner = loaded(CapturableOptimizer([group(1.0, lr=0.125)], capturable=False), saved)
    (own_group,) = inner.param_groups
    assert (type(own_group["lr"]), own_group["lr"], type(own_group["step"]), own_group["step"]) == (
        float,
        0.5,
        int,
        5,
    )
    inner.step()
    assert own_group["step"] == 6


@pytest.mark.parametrize("how", ["capturable", "fused"])
def test_steps_of_torch_optimizers_are_on_the_device_of_their_kernel(
    how: str,
) -> None:
    saved = counted(stepped(adam([group(1.0)])), 0)
    inner = adam([group(1.0, parameters=2)])
    (own_group,) = inner.param_groups
    own_group["params"] = [tensor.as_subclass(DeviceTensor) for tensor in own_group["params"]]
    own_group[how] = True
    loaded(inner, saved)
    assert own_group[how] is True, "a load must keep how this job computes a step"
    steps = [inner.state[parameter]["step"] for parameter in own_group["params"]]
    assert [(tensor.device, tensor.dtype, tensor.item()) for tensor in steps] == [
        (DEVICE, torch.float32, 5.0)
    ] * 2
    loaded(inner, counted(stepped(adam([group(1.0)]), 7), 0))
    assert all(
        inner.state[p]["step"] is tensor
        for p, tensor in zip(own_group["params"], steps, strict=True)
    )
    assert [(tensor.device, tensor.dtype, tensor.item()) for tensor in steps] == [
        (DEVICE, torch.float32, 7.0)
    ] * 2


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

    def made(rate: float) -> torch.optim.AdamW:
        own_group = {**group(1.0), "lr": torch.tensor(rate), **how}
        own_group["betas"] = copy.deepcopy(how.get("betas", (0.75, 0.5)))
        return torch.optim.AdamW([own_group])

    def weights(inner: torch.optim.Optimizer) -> torch.Tensor:
        return torch.cat([tensor.detach() for tensor in inner.param_groups[0]["params"]])

    before = stepped(made(0.5))
    saved = counted(before, 0)
    inner = made(0.125)
    (own_group,), (source,) = inner.param_groups, before.param_groups
    for source_parameter, parameter in zip(source["params"], own_group["params"], strict=True):
        parameter.data.copy_(source_parameter.data)
        state = {
            key: tensor.clone()
            for key, tensor in before.state[source_parameter].items()
            if key != "step"
        }
        inner.state[parameter] = state
    kept = [
        tensor
        for tensor in (own_group["lr"], *own_group["betas"])
        if isinstance(tensor, torch.Tensor)
    ]
    for tensor in kept[1:]:
        tensor.fill_(0.25)
    load_hyper_parameters(wrapped(inner), saved)
    now = [
        tensor
        for tensor in (own_group["lr"], *own_group["betas"])
        if isinstance(tensor, torch.Tensor)
    ]
    assert [id(tensor) for tensor in now] == [id(tensor) for tensor in kept]
    assert type(own_group["betas"]) is tuple
    for steps in (1, 2):
        assert torch.equal(weights(stepped(inner, steps)), weights(stepped(before, steps)))
    assert steps_of(inner) == [[8]]


# ---------------------------------------------------------------------- kept or refused


def test_a_load_keeps_classes_and_functions_of_a_group(make) -> None:
    """Megatron's optimizer for CPU offload lists classes of other optimizers."""
    inner = stepped(make([{**group(1.0, lr=0.5), "kind": torch.optim.AdamW}]))
    saved = hyper_parameters(wrapped(inner))
    assert "kind" not in saved[0]["param_groups"][0]
    other = make([{**group(1.0), "kind": torch.optim.SGD}])
    load_hyper_parameters(wrapped(other), saved)
    assert other.param_groups[0]["kind"] is torch.optim.SGD
    assert rates(other) == [0.5]


def test_a_load_keeps_the_identity_of_a_group(make) -> None:
    saved = hyper_parameters(wrapped(stepped(make([group(1.0, lr=0.5)]))))
    saved[0]["param_groups"][0].update(weight_decay=0.75, foreign="also taken")
    own_group = group(1.0, expert=True)
    inner = make([own_group])
    before = {key: inner.param_groups[0][key] for key in IDENTIFIERS}
    load_hyper_parameters(wrapped(inner), saved)
    (after,) = inner.param_groups
    assert {key: after[key] for key in IDENTIFIERS} == before
    assert after["is_expert_parallel"] is True
    assert after["params"] is inner.param_groups[0]["params"]
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


def test_a_missing_group_without_parameters_is_accepted(make) -> None:
    saved = hyper_parameters(wrapped(stepped(make([group(1.0, lr=0.5)]))))
    inner = make([group(1.0), group(0.25, parameters=0, lr=0.125)])
    check(wrapped(inner), saved)
    load_hyper_parameters(wrapped(inner), saved)
    assert rates(inner) == [0.5, 0.125]


def test_every_optimizer_with_a_scaler_restores_the_loss_scale(make) -> None:
    saved = hyper_parameters(
        chained(wrapped(make([group(1.0)])), wrapped(make([group(0.0)]), Scaler(256.0)))
    )
    scalers = [Scaler(1.0), Scaler(1.0)]
    subs = [wrapped(make([group(0.0), group(1.0)]), scaler) for scaler in scalers]
    load_hyper_parameters(chained(*subs), merge([saved]))
    assert [scaler.scale for scaler in scalers] == [256.0, 256.0]


@pytest.mark.parametrize("merged", [False, True])
def test_chained_optimizers_keep_their_own_loss_scale(make, merged: bool) -> None:
    """Each optimizer checks its own gradients for overflows."""

    def made(dense: float, experts: float) -> ChainedOptimizer:
        return chained(
            wrapped(make([group(1.0)]), Scaler(dense)),
            wrapped(make([group(1.0, expert=True)]), Scaler(experts)),
        )

    saved = hyper_parameters(made(256.0, 512.0))
    loading = made(1.0, 1.0)
    load_hyper_parameters(loading, merge([saved]) if merged else saved)
    assert [sub.grad_scaler.scale for sub in loading.chained_optimizers] == [256.0, 512.0]


def test_a_foreign_optimizer_is_refused_by_name() -> None:
    """Optimizers of other projects and mocks may wrap no torch optimizer."""

    class Theirs:
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(UnsupportedError, match="optimizer Theirs is not one whose state"):
        hyper_parameters(Theirs())


def test_groups_with_equal_identity_are_matched_by_their_settings() -> None:
    def muon(momentum: float) -> torch.optim.Optimizer:
        return torch.optim.Optimizer([{**group(1.0), "momentum": momentum}], {})

    experts = stepped(GroupStepOptimizer([group(1.0, expert=True)]))
    others = stepped(GroupStepOptimizer([group(1.0)]))
    saved = hyper_parameters(chained(wrapped(muon(0.9)), wrapped(others), wrapped(experts)))
    fresh, momentum = GroupStepOptimizer([group(1.0)]), muon(0.5)
    load_hyper_parameters(chained(wrapped(fresh), wrapped(momentum)), merge([saved]))
    assert fresh.param_groups[0]["step"] == 5
    assert "momentum" not in fresh.param_groups[0]
    assert momentum.param_groups[0]["momentum"] == 0.9
    assert "step" not in momentum.param_groups[0]
