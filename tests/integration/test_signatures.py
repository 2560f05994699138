"""Arguments are bound by name for every Megatron release; an unknown argument is refused.

The table below lists the signatures (parameter names and the number of required ones), because this
machine has only one release installed; the binding code is the real one. Only 0.17.1 runs as a
whole, in the other tests of this folder.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from megatron_flashckpt.megatron_lm import stock
from megatron_flashckpt.megatron_lm.stock import LoadCall, SaveCall, bind

SAVE = "iteration model optimizer opt_param_scheduler num_floating_point_operations_so_far".split()
RANKS = (
    "checkpointing_context pipeline_rank expert_rank tensor_rank pipeline_parallel expert_parallel"
).split()
GROUPS_16 = ["release", "tp_group", "pp_group", "dp_cp_group"]
GROUPS_19 = ["dp_group", "expt_dp_group", "rng_state_key_prefix"]
LOAD = ["optimizer", "opt_param_scheduler", "load_arg", "strict"]
SKIP = ["checkpointing_context", "skip_load_to_model_and_opt"]
ITERATOR = ["non_persistent_ckpt", "train_data_iterator"]
COMMON = ["preprocess_common_state_dict_fn"]

#: release -> (parameters of save_checkpoint, of load_checkpoint, of maybe_finalize_async_save)
RELEASES: dict[str, tuple[list[str], list[str], list[str] | None]] = {
    "cb995d5": (SAVE, ["model", *LOAD], None),
    "core_v0.8.0": ([*SAVE, *RANKS], ["model", *LOAD], ["blocking"]),
    "core_v0.10.0": (
        [*SAVE, *RANKS, *ITERATOR, "ft_client", *COMMON],
        ["model", *LOAD, "ft_client", *SKIP],
        ["blocking"],
    ),
    "core_v0.12.0": (
        [*SAVE, *RANKS, *ITERATOR, *COMMON],
        ["ddp_model", *LOAD, *SKIP],
        ["blocking", "terminate"],
    ),
    "core_v0.16.1": (
        [*SAVE, *RANKS, *ITERATOR, *COMMON, *GROUPS_16],
        ["ddp_model", *LOAD, *SKIP, *GROUPS_16[1:]],
        ["blocking", "terminate"],
    ),
    "core_v0.19.0": (
        [*SAVE, *RANKS, *ITERATOR, *COMMON, *GROUPS_16, *GROUPS_19],
        ["ddp_model", *LOAD, *SKIP, *GROUPS_16[1:], *GROUPS_19],
        ["blocking", "terminate"],
    ),
}
DEFAULTS = {"load_arg": "load", "strict": True, "non_persistent_ckpt": False, "release": False}


def function(names: list[str], required: int) -> object:
    """Return a function with these parameters, the first `required` without a default."""
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if n < required else DEFAULTS.get(name),
        )
        for n, name in enumerate(names)
    ]

    def stand_in(*args: object, **kwargs: object) -> None:
        raise AssertionError("the stock function is not called")

    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return stand_in


@pytest.fixture(params=RELEASES, ids=str)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    save, load, _ = RELEASES[request.param]
    module = SimpleNamespace(save_checkpoint=function(save, 5), load_checkpoint=function(load, 3))
    monkeypatch.setattr(stock, "stock_module", lambda name: module)
    monkeypatch.setattr(stock, "_ORIGINALS", {})
    return request.param


def test_a_save_is_bound_as_training_calls_it(release: str) -> None:
    names = RELEASES[release][0]
    positional = (7, ["chunk"], "optimizer", "scheduler", 12.5)
    if "checkpointing_context" in names:
        positional = (*positional, {})
    by_name = {"train_data_iterator": "data", "preprocess_common_state_dict_fn": print}
    keywords = {name: value for name, value in by_name.items() if name in names}
    call = SaveCall.of(positional, keywords)
    assert (call.iteration, call.model, call.optimizer) == (7, ["chunk"], "optimizer")
    assert (call.scheduler, call.floating_point_operations) == ("scheduler", 12.5)
    assert (call.non_persistent, call.release) == (False, False)
    assert call.data_iterator == keywords.get("train_data_iterator")


def test_the_autoresume_path_saves_without_the_operations(release: str) -> None:
    assert SaveCall.of((7, ["chunk"], None, None), {}).floating_point_operations == 0


def test_non_persistent_and_release_saves_are_distinguished(release: str) -> None:
    for name, attribute in (("non_persistent_ckpt", "non_persistent"), ("release", "release")):
        if name in RELEASES[release][0]:
            call = SaveCall.of((7, ["chunk"], None, None, 0), {name: True})
            assert getattr(call, attribute) is True


def test_an_argument_that_the_release_does_not_have_is_refused(release: str) -> None:
    with pytest.raises(TypeError, match="from_the_future"):
        SaveCall.of((7, ["chunk"], None, None, 0), {"from_the_future": 1})
    with pytest.raises(TypeError, match="from_the_future"):
        LoadCall.of((["chunk"], None, None), {"from_the_future": 1})


def test_a_load_is_bound_by_position_and_both_first_parameter_names(
    release: str,
) -> None:
    for args, kwargs in (
        ((["chunk"], "optimizer", "scheduler"), {}),
        ((), {"model": ["chunk"], "optimizer": "optimizer", "opt_param_scheduler": "scheduler"}),
        (
            (),
            {"ddp_model": ["chunk"], "optimizer": "optimizer", "opt_param_scheduler": "scheduler"},
        ),
    ):
        call = LoadCall.of(args, kwargs)
        assert (call.model, call.optimizer, call.scheduler) == (["chunk"], "optimizer", "scheduler")
        assert (call.load_arg, call.strict, call.skip_model_and_optimizer) == ("load", True, False)
    call = LoadCall.of((["chunk"], None, None), {"load_arg": "pretrained", "strict": False})
    assert (call.load_arg, call.strict) == ("pretrained", False)


@pytest.mark.parametrize("name", [name for name in RELEASES if RELEASES[name][2]])
def test_finalizing_is_bound_as_each_release_calls_it(name: str) -> None:
    names = RELEASES[name][2] or []
    stand_in = function(names, 0)
    assert bind(stand_in, (True,), {})["blocking"] is True
    assert bind(stand_in, (), {"blocking": False})["blocking"] is False
    if "terminate" in names:
        assert bind(stand_in, (), {"blocking": True, "terminate": True})["terminate"] is True
