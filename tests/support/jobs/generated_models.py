"""One Megatron job that saves, or loads, many small models of unusual shapes and types.

Run by `tests/integration/test_generated.py`. `CASES` is a JSON file with a list of models (see
`Model`), each with the iteration number under which it is saved. `MODE` is `save` or `load`.

Megatron's DistributedDataParallel wraps each model, and Megatron's optimizer steps it; gradients
are set, not computed. If the self-check passes, the model makes two steps and is saved to
`ROOT/LAYOUT`, together with its state for comparisons. Then the model is loaded from memory into a
new one. A loading job loads the save of each layout in `SAVED_BY`. The names of all differences are
traced.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import held_tensors
import msgspec
import numpy as np
import torch
from megatron.core import mpu
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.training import get_args
from megatron.training.training import (
    get_megatron_optimizer_config,
    get_optimizer_param_scheduler,
)

from megatron_flashckpt.checkpointing import load_checkpoint, save_checkpoint
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.megatron_lm.megatron_job import job_of
from megatron_flashckpt.save.session import session
from scripts import pretrain_gpt_tiny as tiny
from tests.support.jobs.traces import trace

RANK = int(os.environ["RANK"])
ROOT = Path(os.environ["ROOT"])
LAYOUT = os.environ["LAYOUT"]
FLAGS = {
    "fp32": {},
    "fp32 distributed": {"use_distributed_optimizer": True},
    "fp32 sgd": {"optimizer": "sgd"},
    "bf16": {"bf16": True},
    "bf16 distributed": {"bf16": True, "use_distributed_optimizer": True},
}


def seeded(*names: Any) -> torch.Generator:
    encoded = "/".join(map(str, names)).encode()
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(encoded).digest()[:6], "little")
    )


def values(shape: list[int], dtype: torch.dtype, *names: Any) -> torch.Tensor:
    """Return values that are equal for equal names, in every process."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, shape, generator=seeded(*names)).to(dtype)
    return torch.randn(shape, generator=seeded(*names)).to(dtype)


def tensor_of(entry: dict[str, Any], dtype: str, *names: Any) -> torch.Tensor:
    """Return a tensor with the shape and memory layout of `entry`."""
    shape = entry["shape"]
    kind = getattr(torch, dtype)
    if entry.get("transposed") and shape:
        return values(shape[::-1], kind, *names).permute(*reversed(range(len(shape))))
    if entry.get("strided"):
        return values([2 * n for n in shape], kind, *names)[
            tuple(slice(None, None, 2) for _ in shape)
        ]
    if entry.get("expanded"):
        return values([1] * len(shape), kind, *names).expand(*shape)
    return values(shape, kind, *names)


class Holder(MegatronModule):
    """Parameters and buffers with the names, shapes and types of `entries`."""

    def __init__(self, config: Any, entries: dict[str, Any], place: Any, layer: int) -> None:
        super().__init__(config)
        for name, entry in entries.items():
            dtype = entry["dtypes"][layer]
            tensor = tensor_of(entry, dtype, *place, layer, name)
            if entry.get("buffer"):
                self.register_buffer(name, tensor)
            else:
                frozen = entry.get("frozen", [False] * (layer + 1))[layer]
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=not frozen))


class Model(MegatronModule):
    """Layers that share keys, as in Megatron's transformer blocks, and further entries.

    A case has `layers` (entries with one type per layer), `single` (entries with one type), `tied`
    (pairs of names: the second becomes the first's parameter) and `optimizer`. An entry has a
    `shape`, its `dtypes`, and perhaps `buffer`, `frozen` (per layer), `unused`, `transposed`,
    `strided` or `expanded`.
    """

    def __init__(self, config: Any, case: dict[str, Any], seed: Any) -> None:
        super().__init__(config)
        stages, stage = (
            mpu.get_pipeline_model_parallel_world_size(),
            mpu.get_pipeline_model_parallel_rank(),
        )
        self.count = case["count"]
        self.numbers = [n for n in range(self.count) if n * stages // max(self.count, 1) == stage]
        self.layers = torch.nn.ModuleList(
            Holder(config, case["layers"], (seed,), number) for number in self.numbers
        )
        first = stage == 0
        self.single = Holder(config, case["single"] if first else {}, (seed, "single"), 0)
        for one, other in case["tied"] if first else []:
            self.single._parameters[other] = self.single._parameters[one]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[()] = (), metadata: Any = None
    ) -> dict[str, Any]:
        sharded = self.single.sharded_state_dict(f"{prefix}single.", (), metadata)
        for place, (number, layer) in enumerate(zip(self.numbers, self.layers, strict=True)):
            local = f"{prefix}layers.{place}."
            offsets = ((0, number, self.count),)
            of_layer = layer.sharded_state_dict(local, offsets, metadata)
            replace_prefix_for_sharding(of_layer, local, f"{prefix}layers.")
            sharded.update(of_layer)
        return sharded


class Job:
    """A model with its optimizer and scheduler, made by Megatron."""

    def __init__(self, case: dict[str, Any], seed: Any) -> None:
        args = get_args()
        vars(args).update(
            bf16=False,
            params_dtype=torch.float32,
            use_distributed_optimizer=False,
            optimizer="adam",
            # Megatron clips fp32 gradients only.
            clip_grad=1.0 if case["optimizer"].startswith("bf16") else 0.0,
        )
        vars(args).update(FLAGS[case["optimizer"]])
        if args.bf16:
            args.params_dtype = torch.bfloat16
        config = TransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            pipeline_dtype=torch.float32,
        )
        ddp = DistributedDataParallelConfig(
            # An optimizer without masters takes gradients in the types of its parameters.
            grad_reduce_in_fp32=args.bf16,
            use_distributed_optimizer=args.use_distributed_optimizer,
        )
        self.case = case
        self.model = self.make_model(config, seed)
        self.chunks = [DistributedDataParallel(config, ddp, self.model)]
        settings, overrides = get_megatron_optimizer_config(args)
        self.optimizer = get_megatron_optimizer(settings, self.chunks, overrides)
        self.scheduler = get_optimizer_param_scheduler(self.optimizer)

    def make_model(self, config: Any, seed: Any) -> Any:
        return Model(config, self.case, seed)

    def step(self, number: int) -> None:
        unused = {
            n for n, e in (self.case["layers"] | self.case["single"]).items() if e.get("unused")
        }
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                gradient = values(list(parameter.shape), torch.float32, "gradient", number, name)
                if name.rpartition(".")[2] in unused:
                    gradient.zero_()
                parameter.main_grad.copy_(gradient)
        self.optimizer.step()
        self.scheduler.step(increment=8)
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    def held(self) -> dict[str, Any]:
        """Return all state that a load must restore on this rank, by Megatron's own accessors.

        Tensor names are equal under every layout and include the range that this rank holds.
        """
        names: dict[int, str] = {}
        tensors: dict[str, list[Any]] = {}

        def described(name: str) -> str:
            head, _, rest = name.partition(".")
            if head != "layers":
                return name
            place, _, rest = rest.partition(".")
            return f"layers.{self.model.numbers[int(place)]}.{rest}"

        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), described(name))
            value = parameter.detach().reshape(-1).clone()
            tensors[f"weight {described(name)}"] = [0, value.numel(), value]
        for name, buffer in self.model.named_buffers():
            value = buffer.detach().reshape(-1).clone()
            tensors[f"buffer {described(name)}"] = [0, value.numel(), value]
        for parameter, start, end, owned, states in held_tensors.stepped(self.optimizer):
            for kind, value in {"stepped": owned, **states}.items():
                flat = value.detach().reshape(-1).clone()
                tensors[f"{kind} {names[id(parameter)]}"] = [start, end, flat]
        return {
            "tensors": tensors,
            "groups": self.groups(),
            "steps": held_tensors.steps(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1]],
        }

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups that have parameters on this rank, without the parameters."""
        return [
            {key: value for key, value in group.items() if key not in ("params", "step")}
            for sub in held_tensors.sub_optimizers(self.optimizer)
            for group in sub.optimizer.param_groups
            if group["params"]
        ]


def differing(own: dict[str, Any], saved: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the name of all state that differs from the state of the ranks that saved."""
    stored: dict[str, list[list[Any]]] = {}
    for of_rank in saved:
        for name, held in of_rank["tensors"].items():
            stored.setdefault(name, []).append(held)
    for name, (start, end, value) in own["tensors"].items():
        if name not in stored:
            if end > start:
                yield f"{name}: was not there"
            continue
        dtype = stored[name][0][2].dtype
        whole = torch.zeros(max(there for _, there, _ in stored[name]), dtype=dtype)
        for low, high, part in stored[name]:
            whole[low:high] = part
        if value.dtype != dtype or not torch.equal(bits(value), bits(whole[start:end])):
            yield f"{name}: {value} is not {whole[start:end]}"
    kept = [group for of_rank in saved for group in of_rank["groups"]]
    yield from (f"group {settings}" for settings in own["groups"] if settings not in kept)
    for name in ("steps", "scheduler"):
        versions = [of_rank[name] for of_rank in saved if of_rank["steps"]]
        if own["steps"] and own[name] not in versions:
            yield f"{name}: {own[name]} is not {versions}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat tensor, in which equal NaNs compare equal."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def random_state_differs(own: dict[str, Any], saved: dict[str, Any]) -> bool:
    pairs = zip(own["random"], saved["random"], strict=True)
    same = [
        one == other if isinstance(one, tuple) else np.array_equal(one, other)
        for one, other in pairs
    ]
    return not all(same)


def save(case: dict[str, Any]) -> None:
    """Save `case` if the self-check accepts it, then load it from memory."""
    args = get_args()
    place, number = ROOT / LAYOUT, case["number"]
    args.save, args.load, args.ckpt_step = str(place / "save"), None, None
    job = Job(case, "saved")
    try:
        session.startup(get_args().save).prepare(job_of(get_args(), job.chunks, job.optimizer))
    except FlashCkptError as error:
        trace(event="refused", case=case["name"], error=str(error))
        session.close(leave=True)
        return
    for step in range(2):
        job.step(step)
    torch.save(job.held(), place / f"held-{number}-{RANK}")
    save_checkpoint(number, job.chunks, job.optimizer, job.scheduler, 0)
    outcomes = session.checkpointer(args.save).wait()
    torch.distributed.barrier()
    trace(
        event="saved",
        case=case["name"],
        wrong=[outcome.error for outcome in outcomes if outcome.error],
    )
    session.abandon()
    args.load = args.save
    trace(event="from memory", case=case["name"], wrong=load(case, LAYOUT, "memory"))


def load(case: dict[str, Any], saved_by: str, source: str) -> list[str]:
    """Load `case` into a new model; return the names that differ from the save of `saved_by`."""
    job = Job(case, "fresh")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        load_checkpoint(job.chunks, job.optimizer, job.scheduler)
    files = sorted((ROOT / saved_by).glob(f"held-{case['number']}-*"))
    saved = [torch.load(file, weights_only=False) for file in files]
    own = job.held()
    wrong = list(differing(own, saved))
    if saved_by == LAYOUT and random_state_differs(own, saved[RANK]):
        wrong.append("random state")
    if RANK == 0 and f"was restored from {source}" not in printed.getvalue():
        wrong.append(f"not from {source}: {printed.getvalue()}")
    return wrong


def load_thawed(case: dict[str, Any]) -> list[str]:
    """Load `case` into a model that also trains its frozen weights; return the wrong masters.

    The load is not strict, as the checkpoint has no optimizer state of these weights.
    """
    args = get_args()
    single = case["single"]
    thawed = {name for name, entry in single.items() if entry.get("frozen")}
    trained = {name: {**entry, "frozen": [False]} for name, entry in single.items()}
    job = Job({**case, "single": trained}, "fresh")
    strictness, args.dist_ckpt_strictness = args.dist_ckpt_strictness, "log_all"
    load_checkpoint(job.chunks, job.optimizer, job.scheduler)
    args.dist_ckpt_strictness = strictness
    held = job.held()["tensors"]
    wrong = []
    for name in thawed & {name.rpartition(".")[2] for name in held}:
        start, end, master = held.get(f"stepped single.{name}", (0, 0, torch.zeros(0)))
        weight = held[f"weight single.{name}"][2][start:end]
        if not torch.equal(master, weight.to(master.dtype)):
            wrong.append(f"{name}: {master} is no master of {weight}")
    return wrong


def main() -> None:
    tiny.initialize()
    args = get_args()
    (ROOT / LAYOUT).mkdir(exist_ok=True)
    for case in json.loads(Path(os.environ["CASES"]).read_text()):
        # A last model that is refused starts no agent, and so ends none.
        own = {"runtime_dir": os.environ["FLASHCKPT_RUNTIME_DIR"], "agent": {"grace_s": 20.0}}
        settings = {**own, **case.get("config", {})}
        session.config = msgspec.convert(settings, Config)
        session.close(leave=False)
        if os.environ["MODE"] == "save":
            save(case)
            torch.distributed.barrier()
            continue
        for saved_by in os.environ["SAVED_BY"].split():
            args.save, args.load = None, str(ROOT / saved_by / "save")
            args.ckpt_step = case["number"]
            wrong = load(case, saved_by, "storage")
            trace(event=f"from {saved_by}", case=case["name"], wrong=wrong)
            if case.get("thawed"):
                trace(event=f"thawed {saved_by}", case=case["name"], wrong=load_thawed(case))
    session.close(leave=True)


if __name__ == "__main__":
    main()
