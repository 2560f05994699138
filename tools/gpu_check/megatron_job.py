"""Program of section `megatron`: `scripts/pretrain_gpt_tiny.py` under a schedule.

Environment:
    SCHEDULE  JSON object:
        saves     kind of the save after an iteration, "memory" or "storage", by iteration
        variants  name of the saves (`variants.py`) from an iteration on, by iteration
        digests   iterations after which all tensors of model and optimizer are digested
        kill      before this iteration, the process kills itself with SIGKILL
    TRACE     file that gets one JSON line for each event
    LOSS_LOG  see `pretrain_gpt_tiny`

Times are taken at the start of iterations. So the time of an iteration includes the save that
follows it, with the work of the training loop around that save; the schedule's own work is left
out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from megatron_flashckpt.memory.host_memory import available_nbytes

#: Elements of a tensor that are digested at once.
_PART_NUMEL = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Schedule:
    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._digest: Digest | None = None
        self._variant = contextlib.ExitStack()

    def before(self, iteration: int, model: list[Any], optimizer: Any) -> None:
        """Carry out the schedule before `iteration`, counted from 1."""
        from megatron.training import get_args

        entered = time.perf_counter()
        if iteration - 1 in self._given["digests"]:
            digest = self._digest = self._digest or Digest()
            digests = {name: digest.of(tensor) for name, tensor in tensors(model, optimizer)}
            trace("digests", iteration=iteration - 1, digests=digests)
        if iteration >= self._given["kill"]:
            trace("killed", copying=is_copying(get_args().save))
            os.kill(os.getpid(), signal.SIGKILL)
        if (variant := self._given["variants"].get(str(iteration))) is not None:
            self._use(variant, get_args().save)
        save = self._given["saves"].get(str(iteration))
        # Megatron's loop reads both arguments after every iteration.
        get_args().save_interval = 1 if save == "storage" else None
        get_args().non_persistent_save_interval = 1 if save == "memory" else None
        free, total = torch.cuda.mem_get_info()
        memory = {"gpu_nbytes": total - free, "host_nbytes": available_nbytes()}
        trace("begin", iteration=iteration, entered=entered, **memory)

    def _use(self, variant: str, save: str) -> None:
        """Make saves to the directory `save` as `variant` from now on; other names: as usual."""
        from megatron_flashckpt.save.session import session
        from tools.gpu_check.variants import VARIANTS

        self._variant.close()
        if variant in VARIANTS:
            self._variant.enter_context(VARIANTS[variant](session.checkpointer(save).link))


def trace(event: str, **fields: Any) -> None:
    with open(os.environ["TRACE"], "a") as file:
        print(json.dumps({"event": event, "time": time.perf_counter(), **fields}), file=file)


def is_copying(save: str | None) -> bool:
    """Return whether copies of a save to directory `save` are under way."""
    from megatron_flashckpt.save.session import session
    from tools.gpu_check import machine

    return save is not None and machine.is_copying(session.checkpointer(save).link.stager)


class Digest:
    """Digest of a tensor's bits in 64 bits, made on the tensor's device."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)  # leaves the generators of training alone
        factors = torch.randint(1 << 62, (_PART_NUMEL,), generator=generator)
        self._factors = (2 * factors + 1).to("cuda")  # an odd factor loses no bit

    def of(self, tensor: torch.Tensor) -> int:
        """Return the sum over all elements of (element + 1) * factor, modulo 2**64."""
        flat = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        factors = self._factors[: flat.numel()].to(flat.device)
        for part in flat.split(_PART_NUMEL):
            total = 31 * total + ((part.to(torch.int64) + 1) * factors[: part.numel()]).sum()
        return int(total.item())


def tensors(model: list[Any], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers of the model, masters and states of the optimizer.

    They are read from torch's own objects, so no code of ours chooses the compared tensors.
    """
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


def main(arguments: list[str]) -> None:
    """Train with Megatron's arguments until the schedule kills this process."""
    import megatron.training.training as training

    from scripts import pretrain_gpt_tiny as tiny

    sys.argv = [__file__, *arguments]
    os.chdir(Path(os.environ["TRACE"]).parent)
    torch.set_num_threads(1)
    # Otherwise --deterministic-mode fills every `torch.empty` of a load first.
    torch.utils.deterministic.fill_uninitialized_memory = False
    given = json.loads(os.environ["SCHEDULE"])
    schedule = Schedule(given)
    if given["variants"]:
        from tools.gpu_check import variants

        variants.prepare()
    step = training.train_step

    @functools.wraps(step)
    def scheduled(*args: Any, **kwargs: Any) -> Any:
        schedule.before(int(training.get_args().curr_iteration) + 1, args[2], args[3])
        return step(*args, **kwargs)

    training.train_step = scheduled
    tiny.train(tiny.datasets_provider, tiny.model_provider, tiny.forward_step)


if __name__ == "__main__":  # run by `megatron_flashckpt.launch`
    main(sys.argv[1:])
