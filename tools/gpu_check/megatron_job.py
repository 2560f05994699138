"""Script of section `megatron`: `scripts/pretrain_gpt_tiny.py` under a schedule.

Environment:
    SCHEDULE  JSON object:
        saves       kind of the save after an iteration, "memory" or "storage", by iteration
        digests     iterations after which all tensors of model and optimizer are digested
        wait_until  before this iteration, wait until the memory for saves is page-locked
        kill        before this iteration, the process kills itself with SIGKILL
    TRACE     file that gets one JSON line for each event
    LOSS_LOG  see `pretrain_gpt_tiny`

Times are taken at the start of iterations. So the time of an iteration includes the save that
follows it, with the work of the training loop around that save.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import megatron.training.training as training
import torch
import torch.utils.deterministic
import xxhash
from megatron.training import get_args

from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.session import session
from scripts import pretrain_gpt_tiny as tiny

SCHEDULE = json.loads(os.environ["SCHEDULE"])
#: Size of the copies to the host for digests.
BUFFER_NBYTES = 256 << 20


def trace(event: str, **fields: Any) -> None:
    """Append one line to the trace."""
    with open(os.environ["TRACE"], "a") as file:
        print(json.dumps({"event": event, "time": time.perf_counter(), **fields}), file=file)


def scheduled(step: Any) -> Any:
    """Return `train_step` with the schedule carried out before each iteration."""

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        model, optimizer = args[2], args[3]
        iteration = int(get_args().curr_iteration) + 1
        before(iteration, model, optimizer)
        return step(*args, **kwargs)

    return wrapper


def before(iteration: int, model: list[Any], optimizer: Any) -> None:
    """Carry out the schedule before `iteration`, counted from 1."""
    if iteration == SCHEDULE["wait_until"]:
        started = time.perf_counter()
        checkpointer().link.wait_for_device_work()
        trace("page-locked", seconds=time.perf_counter() - started)
    if iteration - 1 in SCHEDULE["digests"]:
        trace("digests", iteration=iteration - 1, digests=dict(digests(model, optimizer)))
    if iteration >= SCHEDULE["kill"]:
        trace("killed", copying=is_copying(), slots=[int(state) for state in slot_states()])
        os.kill(os.getpid(), signal.SIGKILL)
    save = SCHEDULE["saves"].get(str(iteration))
    # Megatron's loop reads both arguments after every iteration.
    get_args().save_interval = 1 if save == "storage" else None
    get_args().non_persistent_save_interval = 1 if save == "memory" else None
    free, total = torch.cuda.mem_get_info()
    trace("begin", iteration=iteration, gpu_nbytes=total - free)


def checkpointer() -> Checkpointer:
    """Return the checkpointer of this job."""
    return session.checkpointer(get_args().save)


def is_copying() -> bool:
    """Return whether copies of a save are under way."""
    job = checkpointer().link.stager._current
    return job is not None and not job.copied.is_set()


def slot_states() -> list[int]:
    """Return the state of every slot of this rank."""
    slab = checkpointer().link._slab
    return [] if slab is None else [slot.header.state for slot in slab.slots]


def digests(model: list[Any], optimizer: Any) -> Iterator[tuple[str, str]]:
    """Yield the digest of every tensor of model and optimizer.

    The tensors are read from torch's own objects, so no code of ours chooses the compared tensors.
    """
    buffer = torch.empty(BUFFER_NBYTES, dtype=torch.uint8, pin_memory=True)
    for name, tensor in tensors(model, optimizer):
        whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest = xxhash.xxh3_128()
        for part in whole.split(BUFFER_NBYTES):
            digest.update(buffer[: part.numel()].copy_(part).numpy().data)
        yield name, digest.hexdigest()


def tensors(model: list[Any], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers of the model, masters and states of the optimizer."""
    for number, chunk in enumerate(model):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield f"model {number} {name}", tensor
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, part in enumerate(inner):
        for index, group in enumerate(part.optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                where = f"optimizer {number} {index} {place}"
                yield f"{where} parameter", parameter
                for name, value in sorted(part.optimizer.state[parameter].items()):
                    if isinstance(value, torch.Tensor):
                        yield f"{where} {name}", value


if __name__ == "__main__":
    # Otherwise --deterministic-mode fills every `torch.empty` of a load first.
    torch.utils.deterministic.fill_uninitialized_memory = False
    training.train_step = scheduled(training.train_step)
    training.pretrain(
        tiny.datasets_provider,
        tiny.model_provider,
        tiny.ModelType.encoder_or_decoder,
        tiny.forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
