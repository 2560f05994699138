"""One Megatron job in which each case changes Megatron as a newer release might.

Run by torchrun from the tests. Each case changes the real modules, model or optimizer, calls
`begin` (the step that every entry point makes before training), traces the error that it raised,
and undoes the change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import megatron.training.training as training
import torch
from megatron.core import parallel_state
from megatron.training import checkpointing, get_args

from megatron_flashckpt.checkpointing import save_checkpoint
from megatron_flashckpt.megatron_lm.megatron_job import job_of
from megatron_flashckpt.memory.host_memory import Limit
from megatron_flashckpt.save import entry_points, node_memory
from megatron_flashckpt.save.session import session
from scripts import pretrain_gpt_tiny as tiny
from tests.support.jobs.traces import trace

RANK = int(os.environ["RANK"])
_GONE = object()

Job = tuple[list[Any], Any]
"""Model chunks and optimizer, as Megatron made them."""


@contextlib.contextmanager
def changed(holder: Any, name: str, value: Any = _GONE) -> Iterator[None]:
    """Set or remove an attribute; a renamed method is missing under its old name."""
    there = name in vars(holder)
    before = getattr(holder, name)
    if value is _GONE:
        delattr(holder, name)
    else:
        setattr(holder, name, value)
    try:
        yield
    finally:
        if there:
            setattr(holder, name, before)
        else:
            delattr(holder, name)


def sub(job: Job) -> Any:
    """Return the DistributedOptimizer, which Megatron wraps in a chain."""
    return job[1].chained_optimizers[0]


def first_parameter(job: Job) -> Any:
    """Return a parameter of which this rank has a part."""
    return next(p for group in sub(job).model_float16_groups for p in group)


@contextlib.contextmanager
def masters(job: Job, edit: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Edit the optimizer's lists of masters; its inner optimizer still steps all of them."""
    with contextlib.ExitStack() as stack:
        for name in ("model_float16_groups", "shard_fp32_from_float16_groups"):
            groups = [edit(group) for group in getattr(sub(job), name)]
            stack.enter_context(changed(sub(job), name, groups))
        yield


@contextlib.contextmanager
def buffer_lacks(job: Job) -> Iterator[None]:
    """Remove a parameter from all gradient buffers, so that no rank's optimizer would step it."""
    (buffer,) = sub(job).buffers
    lost = job[0][0].module.module.decoder.layers[0].mlp.linear_fc2.weight
    rest = {p: at for p, at in buffer.param_index_map.items() if p is not lost}
    with changed(buffer, "param_index_map", rest):
        yield


@contextlib.contextmanager
def added(job: Job, *, frozen: bool) -> Iterator[None]:
    """Add a parameter that only its module knows."""
    model = job[0][0].module.module
    model.extra = torch.nn.Parameter(torch.zeros(3), requires_grad=not frozen)
    try:
        yield
    finally:
        del model.extra


@contextlib.contextmanager
def not_in_state_dict(job: Job) -> Iterator[None]:
    """Hide a parameter from the model's own list for checkpoints."""
    model = job[0][0].module.module

    def listed(*args: Any, **kwargs: Any) -> Any:
        sharded = sharded_state_dict(*args, **kwargs)
        return {name: value for name, value in sharded.items() if name != "extra"}

    with added(job, frozen=True):
        sharded_state_dict = model.sharded_state_dict
        with changed(model, "sharded_state_dict", functools.wraps(sharded_state_dict)(listed)):
            yield


def state_dict_fails(job: Job) -> contextlib.AbstractContextManager[None]:
    """Make the model fail when Megatron lists it."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError({f"layer.{number}": 0 for number in range(1000)}.keys())

    return changed(job[0][0].module.module, "sharded_state_dict", fail)


@contextlib.contextmanager
def frozen_in_optimizer(job: Job) -> Iterator[None]:
    """Freeze a parameter after the optimizer was made, as Megatron itself does for a while."""
    parameter = first_parameter(job)
    parameter.requires_grad = False
    try:
        yield
    finally:
        parameter.requires_grad = True


def new_signature(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a function that calls `function`, with one parameter renamed."""

    def newer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    parameters = inspect.signature(function).parameters.values()
    newer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(name=new) if p.name == old else p for p in parameters]
    )
    return newer


def wrong_part(job: Job) -> contextlib.AbstractContextManager[None]:
    """Make a rank leave its part to another: only the sum over all ranks is then wrong."""
    return changed(sub(job), "distributed_optimizer_instance_id", RANK)


@contextlib.contextmanager
def odd_state(job: Job) -> Iterator[None]:
    inner = sub(job).optimizer
    owned = next(p for group in inner.param_groups for p in group["params"])
    inner.state[owned] = {"row_factor": torch.zeros(2), "scale": 1.5}
    try:
        yield
    finally:
        del inner.state[owned]


@contextlib.contextmanager
def converted(job: Job) -> Iterator[None]:
    """Let ModelOpt say that it has converted the model, as after `mtq.quantize`."""
    model = job[0][0].module.module
    modelopt = types.ModuleType("modelopt.torch.opt")
    modelopt.ModeloptStateManager = types.SimpleNamespace(is_converted=lambda m: m is model)
    with mock.patch.dict(sys.modules, {modelopt.__name__: modelopt}):
        yield


CASES: dict[str, Callable[[Job], contextlib.AbstractContextManager[None]]] = {
    "as it is": lambda job: contextlib.nullcontext(),
    "chained_optimizers": lambda job: changed(job[1], "chained_optimizers"),
    "range map": lambda job: changed(type(sub(job)), "_get_model_param_range_map"),
    "get_rerun_state_machine": lambda job: changed(checkpointing, "get_rerun_state_machine"),
    "maybe_save_dataloader_state": lambda job: changed(
        checkpointing, "maybe_save_dataloader_state"
    ),
    "expert ranks": lambda job: changed(parallel_state, "get_expert_model_parallel_rank"),
    "train_data_iterator": lambda job: changed(
        checkpointing,
        "save_checkpoint",
        new_signature(checkpointing.save_checkpoint, "train_data_iterator", "iterator"),
    ),
    "no_load_rng": lambda job: changed(get_args(), "no_load_rng"),
    "master left out": lambda job: masters(job, lambda group: group[:-1]),
    "master doubled": lambda job: masters(job, lambda group: group + group[:1]),
    "no buffer": buffer_lacks,
    "trainable, unknown": lambda job: added(job, frozen=False),
    "not in the state dict": not_in_state_dict,
    "state dict fails": state_dict_fails,
    "frozen, unknown": lambda job: added(job, frozen=True),
    "frozen": frozen_in_optimizer,
    "left to another rank": wrong_part,
    "odd state": odd_state,
    "flags": lambda job: changed(sub(job).ddp_config, "use_megatron_fsdp", True),
    "ModelOpt": converted,
}


def begin(model: list[Any], optimizer: Any) -> None:
    """Run the checks that precede the first step."""
    session.startup(get_args().save).prepare(job_of(get_args(), model, optimizer))


def caught(name: str, call: Callable[[], None]) -> None:
    error = None
    try:
        call()
    except Exception as failure:
        error = [type(failure).__name__, str(failure)]
    trace(event=name, error=error)
    session.close(leave=True)
    torch.distributed.barrier()


def save_first(job: Job) -> None:
    """Save before anything else, as a job may whose script makes its first checkpoint itself."""
    save_checkpoint(5, *job, None, 0)
    begin(*job)


#: State that the next step creates for a parameter.
next_state: Callable[[torch.Tensor], dict[str, torch.Tensor]]


def step(model: list[Any], optimizer: Any) -> None:
    """Replace Megatron's step: only create the optimizer's state."""
    inner = optimizer.chained_optimizers[0].optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            inner.state[parameter] = next_state(parameter)


def adam_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}


def factored_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"row_factor": torch.zeros(2)}


def earlier_job(job: Job) -> None:
    """Train without a load until the start of saves has completed all its phases."""
    global next_state
    next_state = adam_state
    deadline = time.monotonic() + 60
    while get_args().save not in session.ready:
        assert time.monotonic() < deadline, "agent and memory are not ready"
        training.train_step(*job)
        time.sleep(0.01)


def first_step(job: Job) -> None:
    """Run one step of Megatron's loop, which creates state that cannot be saved."""
    global next_state
    next_state = factored_state
    trace(event="stepped", error=None)
    training.train_step(*job)


def with_memory_for(nbytes: int, job: Job) -> None:
    """Begin on a machine that has `nbytes` for slabs of 10 MiB."""
    machine = [Limit("boot", "the machine", nbytes)]
    with (
        changed(node_memory, "limits", lambda: machine),
        changed(node_memory, "slab_nbytes", lambda *_: 10 * 2**20),
    ):
        begin(*job)


def main() -> None:
    tiny.initialize()
    args = get_args()
    save, args.save = args.save, None
    model_type = tiny.ModelType.encoder_or_decoder
    job = training.setup_model_and_optimizer(
        model_provider_func=tiny.model_provider, model_type=model_type
    )[:2]
    args.save = save
    for name, change in CASES.items():
        with change(job):
            caught(name, lambda: begin(*job))
    caught("memory for one", lambda: with_memory_for(15 * 2**20, job))
    calls: dict[str, dict[str, Any]] = {
        "own group": {
            "pipeline_rank": None,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
        },
        "unknown arguments": {"pipeline_rank": 3, "dp_cp_group": "grid", "expert_rank": 0},
    }
    for name, keywords in calls.items():
        caught(name, functools.partial(save_checkpoint, 5, *job, None, 0, **keywords))
    with changed(job[1], "chained_optimizers"):
        caught("save without a start", lambda: save_checkpoint(6, *job, None, 0))
    caught("start after a save", lambda: save_first(job))
    with changed(training, "train_step", step):
        entry_points.watch()
        caught("earlier job", lambda: earlier_job(job))
        caught("first step", lambda: first_step(job))


if __name__ == "__main__":
    main()
