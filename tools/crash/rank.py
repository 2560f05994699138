"""One rank of a crash test: real Megatron, with tensors that differ in every iteration.

The rank runs in its own process, which has imported nothing of megatron_flashckpt before. Each
event is appended to the report of the rank, so the report survives any end of the process.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.training import get_args
from megatron.training.training import setup_model_and_optimizer

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.checkpointing import load_checkpoint, save_checkpoint
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm.load_pieces import load_pieces
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.optimizer_state import entries
from megatron_flashckpt.megatron_lm.stock import unwrap
from megatron_flashckpt.save.session import session
from scripts import pretrain_gpt_tiny as tiny
from tests.support.megatron_jobs import TINY
from tools.crash import trouble
from tools.crash.start import RunPlan

#: Arguments for two ranks with several chunks each. After a restart each rank needs both slots.
MODEL = (
    "--num-layers 2 --bf16 --use-distributed-optimizer --hidden-size 128 --vocab-size 8000 "
    "--train-iters 1000 --save-interval 1 --seed 7"
).split()


class Rank:
    """Model, optimizer and report of a rank."""

    def __init__(self, plan: RunPlan, report: Path) -> None:
        self.plan, self.rank = plan, int(os.environ["RANK"])
        self._report = report
        self._kept: dict[tuple[str, str], torch.Tensor] = {}
        # A file instead of a port, because another process could take the port.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{report.parent}/{report.name.partition('-rank')[0]}.store",
            rank=self.rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        sys.argv = ["pretrain", *TINY, *MODEL, "--save", plan.save]
        tiny.initialize()
        logging.getLogger().setLevel(logging.INFO)
        self.args = get_args()
        self.args.save_retain_interval = plan.retain_interval
        self.job = setup_model_and_optimizer(
            model_provider_func=tiny.model_provider, model_type=tiny.ModelType.encoder_or_decoder
        )
        self.args.load = plan.save

    def report(self, **event: Any) -> None:
        with open(self._report, "a") as file:
            print(json.dumps({"at": time.time(), **event}), file=file)

    def content(self, piece: Piece, iteration: int, seed: int) -> torch.Tensor:
        """Return the elements of a piece at an iteration; they are equal on all ranks."""
        key = f"{seed}/{iteration}/{piece.kind}/{piece.key}"
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)
        whole = torch.rand(piece.global_shape, generator=generator)
        box = tuple(
            slice(start, start + extent)
            for start, extent in zip(piece.offset, piece.shape, strict=True)
        )
        return whole[box].reshape(-1)[piece.start : piece.end]

    def random_state(self, iteration: int, seed: int) -> torch.Tensor:
        drawn = 1000 * seed + 10 * iteration + self.rank
        return torch.Generator().manual_seed(drawn).get_state()

    def pieces(self) -> list[Any]:
        """Return all pieces of this rank, including the optimizer's moments."""
        dtypes = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
        state = ModelState(session.config.replicated)
        families = {entry.family: dtypes for entry in entries(self.job[1])}
        chunks = unwrap(self.job[0])
        return load_pieces(state.geometry(chunks), chunks, self.job[1], families)

    def train(self, iteration: int) -> None:
        """Set all tensors to their contents at `iteration`, once the optimizer may step."""
        session.checkpointer(self.plan.save).link.stager.wait()
        for local in self.pieces():
            local.tensor.copy_(self.content(local.piece, iteration, self.plan.seed))
        torch.set_rng_state(self.random_state(iteration, self.plan.seed))

    def wrong(self, iteration: int, operations: int) -> list[str]:
        """Return the names of the states that differ from `iteration`."""
        seed = self.plan.seed if self.plan.loads is None else self.plan.loads
        names = [
            f"{local.piece.kind}/{local.piece.key}"
            for local in self.pieces()
            if not torch.equal(
                local.tensor, self.content(local.piece, iteration, seed).to(local.tensor.dtype)
            )
        ]
        if operations != 7 * iteration:
            names.append("common state")
        if not torch.equal(torch.get_rng_state(), self.random_state(iteration, seed)):
            names.append("random state")
        return names

    def load(self) -> int:
        iteration, operations = load_checkpoint(*self.job)
        wrong = self.wrong(iteration, operations) if iteration else []
        self.report(loaded=iteration, wrong=wrong)
        return int(iteration)

    def save(self, iteration: int) -> None:
        self.train(iteration)
        dist.barrier()
        self.report(began=iteration)
        save_checkpoint(iteration, *self.job, 7 * iteration)
        checkpointer = session.checkpointer(self.plan.save)
        if self.plan.hurried:
            outcomes = checkpointer.saves.poll()
        else:
            checkpointer.link.stager.wait()
            self.report(staged=iteration)
            outcomes = checkpointer.wait()
        for outcome in outcomes:
            self.report(reported=outcome.iteration, error=outcome.error)

    def run(self) -> None:
        staged = AgentClient.staged
        first = self.load()
        for number in range(self.plan.saves):
            broken = number == self.plan.broken and self.rank == 1
            if self.plan.recovers and self.rank == 0 and number == self.plan.saves - 1:
                trouble.end(self.plan.save)
            AgentClient.staged = _not_sent if broken else staged  # type: ignore[method-assign]
            self.save(first + (number + 1) * self.plan.step)
        for outcome in session.checkpointer(self.plan.save).wait():
            self.report(reported=outcome.iteration, error=outcome.error)
        self.report(ended=True)


def _not_sent(self: AgentClient, *_: object) -> None:
    raise ValueError("this rank sends no message")


def main(plan: RunPlan, report: Path, linger: bool) -> None:
    """Run `plan`; then end as Megatron does, or with `linger` wait for SIGKILL."""
    Rank(plan, report).run()
    while linger:
        time.sleep(60)
    atexit._run_exitfuncs()
