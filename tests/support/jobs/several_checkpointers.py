"""Two models in one process, each with a `Checkpointer` of its own; prints what it has found."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from megatron_flashckpt import Checkpointer, waiting
from megatron_flashckpt.checkpointer import SaveResult
from megatron_flashckpt.errors import FlashCkptError

ROOT = Path(sys.argv[1])
NAMES = ("first", "second")


class Job:
    """A model whose weights are all `value`, and its optimizer."""

    def __init__(self, value: float) -> None:
        config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
        gpt = GPTModel(config, get_gpt_layer_local_spec(), 32, 8).cuda()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, ddp, gpt)
        adam = OptimizerConfig(
            lr=0.125, min_lr=0.125, weight_decay=0.0, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        for parameter in self.model.parameters():
            parameter.data.fill_(value)
        self.optimizer.reload_model_params()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.main_grad.fill_(1.0)
        self.optimizer.step()

    def values(self) -> list[float]:
        """Return the different values of the weights, rounded."""
        seen = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        return sorted({round(value, 4) for value in seen.unique().tolist()})

    def checkpointer(self, name: str) -> Checkpointer:
        return Checkpointer(str(ROOT / name), [self.model], self.optimizer)


def found(what: str, value: object) -> None:
    print(f"found {what}: {value}", flush=True)


def saved(name: str) -> list[str]:
    return sorted(path.name for path in (ROOT / name).glob("iter_*"))


def resume(what: str, job: Job, checkpointer: Checkpointer, **how: Any) -> None:
    """Load; print what was loaded. The agent may still have the newest checkpoint in memory."""
    resumed = checkpointer.load(**how)
    assert resumed is not None
    found(what, (resumed.iteration, resumed.side, job.values()))


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    jobs = [Job(1.0), Job(2.0)]
    opened = [job.checkpointer(name) for job, name in zip(jobs, NAMES, strict=True)]
    found("a fresh start", [checkpointer.load() for checkpointer in opened])
    results: list[list[SaveResult]] = [[], []]
    for iteration in (1, 2):
        for number, (job, checkpointer) in enumerate(zip(jobs, opened, strict=True)):
            job.step()
            results[number] += checkpointer.poll()
            if number < iteration:  # the second one saves iteration 2 only
                checkpointer.save(iteration, {"name": NAMES[number], "step": iteration})
    jobs[0].step()  # waits for its copies; the second model is not stepped
    opened[1].wait_until_staged()
    for number, checkpointer in enumerate(opened):
        results[number] += checkpointer.wait_until_durable()
    found("durable", [[(result.iteration, result.error) for result in own] for own in results])
    with waiting("durable"):
        opened[0].save(3, {"name": NAMES[0], "step": 3})
    waited = [(result.iteration, result.error) for result in opened[0].poll()]
    found("polled after a durable save", waited)
    found("in storage at once", saved(NAMES[0]))
    opened[0].save(4, memory_only=True)
    for checkpointer in opened:
        checkpointer.close()
        checkpointer.close()
    found("after close", saved(NAMES[0]))

    job = Job(0.0)
    with job.checkpointer(NAMES[1]) as checkpointer:
        resume("newest", job, checkpointer)
    with job.checkpointer(NAMES[0]) as checkpointer:
        resume("a named step", job, checkpointer, step=2)
        resume("weights", job, checkpointer, directory=str(ROOT / NAMES[1]), weights_only=True)
        try:
            checkpointer.load(step=7)
        except FlashCkptError as error:
            found("a missing step", f"{type(error).__name__} {str(error).rpartition('; ')[2]}")
    try:
        with job.checkpointer("third") as checkpointer:
            checkpointer.load()
            checkpointer.save(5, memory_only=True)
            sys.exit(0)  # as a loop does whose time is over
    except SystemExit:
        found("after exit", saved("third"))
    unclosed = job.checkpointer("fifth")
    unclosed.load()
    unclosed.save(7)
    unclosed.wait_until_staged()
    with Job(0.0).checkpointer("fifth") as checkpointer:
        resumed = checkpointer.load(f"{ROOT}/fifth/")  # its own directory, by another name
        assert resumed is not None
        threads = [thread.name for thread in threading.enumerate()].count("flashckpt-stage")
        found("in place of an unclosed one", (resumed.iteration, resumed.source, threads))
    checkpointer = job.checkpointer("fourth")
    checkpointer.load()
    (ROOT / "fourth/iter_0000006").write_text("in the way")
    checkpointer.save(6)  # which fails, and the script ends


main()
