"""One Megatron job that runs under many parallel layouts in turn.

Run by `tests/support/megatron_jobs.py`. `CASES` is a JSON file with a list of cells

    {"name": ..., "world": 4, "arguments": [...], "seed": 99, "steps": [["load", DIR], ...]}

A cell is a training job of its own: a new model and optimizer under Megatron's command line
`arguments` (added to this job's own), and a checkpointer without knowledge of earlier cells.
Process groups are made anew when the layout or the world size changes; ranks beyond `world` wait.
The result of each step on each rank is appended to `TRACE_DIR/rank_<r>.jsonl`.

Every layout gets the same global batch, which depends on the iteration alone.
"""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import random
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import cells
import held_tensors
import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunState,
    get_rerun_state_machine,
)
from megatron.core.utils import get_model_config
from megatron.training import get_args, initialize
from megatron.training.training import (
    destroy_global_state,
    setup_model_and_optimizer,
    train_step,
)

from megatron_flashckpt.checkpointing import load_checkpoint, save_checkpoint
from megatron_flashckpt.config import Config
from megatron_flashckpt.save.session import session
from scripts import pretrain_gpt_tiny as tiny
from tests.support.jobs.traces import trace

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
COMMAND_LINE = list(sys.argv)
TOKENS = 250


class Job:
    """Model, optimizer and scheduler of one cell."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        initialize._set_random_seed(seed)
        self.model, self.optimizer, self.scheduler = setup_model_and_optimizer(
            model_provider_func=tiny.model_provider, model_type=tiny.ModelType.encoder_or_decoder
        )
        self.config = get_model_config(self.model[0])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        # A GPU's stream would keep the order; gloo may still send buffers that would be freed.
        self.config.deallocate_pipeline_outputs = False
        for chunk in self.model:
            chunk.train()

    def trace(self, **event: Any) -> None:
        trace(event=self.name, **event)

    # Each step of a cell is one of the following methods.

    def train(self, first: int, last: int) -> None:
        """Train iterations `first` to `last`, both included."""
        args = get_args()
        for iteration in range(first, last + 1):
            iterators = [RerunDataIterator(batches(iteration)) for _ in self.model]
            train_step(
                tiny.forward_step,
                iterators if len(iterators) > 1 else iterators[0],
                self.model,
                self.optimizer,
                self.scheduler,
                self.config,
                get_forward_backward_func(),
                iteration=iteration - 1,
            )
            args.consumed_train_samples += args.global_batch_size

    def save(self, directory: str, iteration: int) -> None:
        args = get_args()
        args.save = directory
        save_checkpoint(iteration, self.model, self.optimizer, self.scheduler, 0)
        outcomes = session.checkpointer(args.save).wait()
        errors = [outcome.error for outcome in outcomes]
        self.trace(step="save", iteration=iteration, errors=errors, **self.side())

    def load(self, directory: str, iteration: int, save: str) -> None:
        args = get_args()
        args.load, args.ckpt_step, args.save = directory, iteration, save
        before = self.side()
        iteration, _ = load_checkpoint(self.model, self.optimizer, self.scheduler)
        self.trace(step="load", iteration=iteration, before=before, **self.side())

    def hold(self) -> None:
        """Trace the tensors of this rank, duplicates included, as Megatron describes them."""
        self.trace(step="hold", held=list(held_tensors.described(self.model, self.optimizer)))

    def interrupt(self) -> None:
        """Put the rerun state machine into the state before a step is run again elsewhere."""
        machine = get_rerun_state_machine()
        machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT

    def side(self) -> dict[str, Any]:
        """Return the state other than tensors that a load restores or keeps."""
        args = get_args()
        settings, of_empty = held_tensors.settings(self.model, self.optimizer)
        return {
            "consumed": args.consumed_train_samples,
            "scheduler": self.scheduler.state_dict(),
            "settings": settings,
            "settings_of_empty": of_empty,
            "steps": held_tensors.steps(self.optimizer),
            "scalers": held_tensors.scalers(self.optimizer),
            "rng": rng_digests(),
            "rerun": get_rerun_state_machine().state.name,
            "place": [
                mpu.get_tensor_model_parallel_rank(),
                mpu.get_pipeline_model_parallel_rank(),
                mpu.get_expert_model_parallel_rank(),
            ],
        }


def rng_digests() -> dict[str, str]:
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy(),
        "tracked": sorted((name, state.numpy().tobytes()) for name, state in tracked.items()),
    }
    return {
        name: hashlib.sha256(pickle.dumps(state)).hexdigest()[:16] for name, state in states.items()
    }


def batches(iteration: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's micro-batches of the global batch of `iteration`."""
    args = get_args()
    generator = torch.Generator().manual_seed(1000 + iteration)
    length = args.seq_length
    rows = torch.randint(0, TOKENS, (args.global_batch_size, length + 1), generator=generator)
    replicas, replica = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    for part in rows.split(args.micro_batch_size)[replica::replicas]:
        yield {
            "tokens": part[:, :-1],
            "labels": part[:, 1:],
            "loss_mask": torch.ones(len(part), length),
            "position_ids": torch.arange(length).expand(len(part), -1),
        }


def meet(store: dist.Store, where: str, ranks: int) -> None:
    """Wait for `ranks` ranks, some of which may have skipped many cells."""
    if store.add(f"ranks at {where}", 1) == ranks:
        store.set(f"all at {where}", "")
    store.wait([f"all at {where}"], timedelta(minutes=30))


def enter_layout(world: int, arguments: list[str], store: dist.Store) -> None:
    """Leave the previous layout, if any, and set up Megatron for this one."""
    if dist.is_initialized():
        destroy_global_state()
        dist.destroy_process_group()
    gc.collect()
    os.environ["WORLD_SIZE"] = str(world)
    sys.argv = [*COMMAND_LINE, *arguments]
    tiny.initialize(store=store)


def run_cell(cell: dict[str, Any]) -> bool:
    """Run all steps of a cell; return False if it leaves state that the next must not see."""
    settings = {"runtime_dir": os.environ["FLASHCKPT_RUNTIME_DIR"], **cell.get("config", {})}
    session.config = msgspec.convert(settings, Config)
    original = dict(vars(get_args()))
    try:
        job = Job(cell["name"], cell["seed"])
        for step, *arguments in cell["steps"]:
            getattr(job, step)(*arguments)
    except Exception as error:
        traceback.print_exc()
        trace(event=cell["name"], step="failed", error=f"{type(error).__name__}: {error}")
        return False
    finally:
        session.close(leave=True)  # cells must not see each other's memory
        vars(get_args()).clear()
        vars(get_args()).update(original)
    # Its state can only be reset together with all of Megatron.
    return get_rerun_state_machine().state == RerunState.NOT_RUNNING_YET


def main() -> None:
    base, all_cells = cells.begin()
    entered = None
    for number, (cell, store) in enumerate(all_cells):
        if cell["world"] <= RANK:
            entered = None  # the other ranks leave the layout
            continue
        layout = (cell["world"], cell["arguments"])
        if layout != entered:
            meet(base, f"cell {number}", cell["world"])
            enter_layout(*layout, store)
            entered = layout
        if not run_cell(cell):
            entered = None
        gc.collect()
    meet(base, "the end", RANKS)  # rank 0 serves the store


if __name__ == "__main__":
    main()
