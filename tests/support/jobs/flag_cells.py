"""Many training jobs in one process: Megatron's own `pretrain`, once per cell, stock or ours.

Run by the tests, one process per rank. `CASES` is a JSON file with a list of cells

    {"name": ..., "entry_point": "stock" | "ours", "arguments": [...], ...}

and optionally

    "copy"        [[FROM, TO, ITERATION], ...]: before the cell, copy a save directory as it was
                  when ITERATION was the newest
    "spoil"       iteration in which the loss is NaN
    "stand_in"    one of `stand_ins.py`
    "attributes"  arguments that are set after Megatron has checked all arguments
    "hold_copies" number of steps for which the late copies of the first save are held, if no
                  optimizer's step waits for them

A cell is a job of its own: all state that Megatron and this package keep per process is discarded
at its end. Its trace is appended to `TRACE_DIR/rank_<r>.jsonl`: exact losses, the way in which it
ended, its output, the calls of Megatron's hooks around checkpoints, and the scalars of TensorBoard.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import (
    checkpointing,
    ft_integration,
    get_args,
    global_vars,
    one_logger_utils,
    training,
    wandb_utils,
)
from megatron.training.arguments import core_transformer_config_from_args
from stand_ins import STAND_INS

from megatron_flashckpt import launch
from megatron_flashckpt.megatron_lm import stock
from megatron_flashckpt.save.session import session
from megatron_flashckpt.save.stager import Stager
from scripts import pretrain_gpt_tiny as tiny
from tests.support import cheap_stock
from tests.support.jobs import token_prediction
from tests.support.jobs.traces import trace
from tests.support.megatron_jobs import truncated_copy

RANK = int(os.environ["RANK"])
COMMAND_LINE = list(sys.argv)
#: Hooks on which users' monitoring depends: each call is traced, then made.
HOOKS = (
    (ft_integration, "on_checkpointing_start"),
    (ft_integration, "on_checkpointing_end"),
    (ft_integration, "on_checkpoint_loaded"),
    (one_logger_utils, "on_save_checkpoint_start"),
    (one_logger_utils, "on_save_checkpoint_success"),
    (one_logger_utils, "on_save_checkpoint_end"),
    (wandb_utils, "on_save_checkpoint_success"),
    (wandb_utils, "on_load_checkpoint_success"),
)


def use(entry_point: str) -> None:
    """Make Megatron call our functions, or its own."""
    if entry_point == "ours":
        launch.install()
        return
    for (module, name), function in stock._ORIGINALS.items():
        ours = getattr(stock.stock_module(module), name)
        for key, importer in list(sys.modules.items()):
            if key.startswith("megatron.") and vars(importer).get(name) is ours:
                setattr(importer, name, function)


def dense_config(args: Any) -> Any:
    """Return the model's configuration; a dense model for upcycling has no experts.

    Megatron 0.17.1 leaves `moe_ffn_hidden_size` set for a dense model, and then refuses it.
    """
    if args.num_experts is not None:
        return core_transformer_config_from_args(args)
    return core_transformer_config_from_args(
        argparse.Namespace(**{**vars(args), "moe_ffn_hidden_size": None})
    )


tiny.core_transformer_config_from_args = dense_config


def layer_spec(num_experts: int | None, moe_grouped_gemm: bool, *_: Any) -> Any:
    """Return the layers that the arguments ask for."""
    args = get_args()
    if isinstance(args.moe_layer_freq, list):
        return get_gpt_decoder_block_spec(dense_config(args), use_transformer_engine=False)
    return get_gpt_layer_local_spec(num_experts, moe_grouped_gemm, args.qk_layernorm, False)


tiny.get_gpt_layer_local_spec = layer_spec


token_prediction.install()


class Rows(torch.utils.data.Dataset):
    """Random rows, each from its own seed: creating a row is as fast as reading one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = get_args().seq_length
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, 250, (length + 1,), generator=generator)
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": torch.ones(length),
            "position_ids": torch.arange(length),
        }


def datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[Rows, Rows, Rows]:
    # Megatron refuses to start without remaining rows, even if no iteration remains.
    return (
        Rows(sizes[0] + get_args().global_batch_size),
        Rows(max(1, sizes[1])),
        Rows(max(1, sizes[2])),
    )


datasets.is_distributed = True


class Recorder:
    """Trace of one cell."""

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell = cell
        self.losses: list[tuple[int, str]] = []
        self.hooks: list[list[Any]] = []
        self.scalars: list[str] = []
        self.output = io.StringIO()
        self.logged = io.StringIO()

    def loss_func(self, mask: torch.Tensor, output: torch.Tensor) -> Any:
        loss, report = tiny.loss_func(mask, output)
        iteration = get_args().curr_iteration + 1
        if self.cell.get("spoil") == iteration:
            loss = loss * float("nan")
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=torch.isnan,
            message="found NaN in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
        self.losses.append((iteration, float(loss).hex()))
        return loss, report

    def model_provider(self, *args: Any, **kwargs: Any) -> Any:
        vars(get_args()).update(self.cell.get("attributes", {}))
        global_vars._GLOBAL_TENSORBOARD_WRITER = self
        return tiny.model_provider(*args, **kwargs)

    def forward_step(self, batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        output, loss_func = tiny.forward_step(batches, model)
        return output, functools.partial(self.loss_func, *loss_func.args)

    def hook(self, module: Any, name: str) -> None:
        function = getattr(module, name)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            plain = [argument for argument in args if isinstance(argument, str | int | bool)]
            self.hooks.append([f"{module.__name__.rpartition('.')[2]}.{name}", plain, kwargs])
            return function(*args, **kwargs)

        for home in (module, checkpointing, training):
            if getattr(home, name, None) is function:
                setattr(home, name, called)

    @contextlib.contextmanager
    def held_copies(self) -> Iterator[None]:
        """Hold the late copies of the first save that has any, if the cell asks for it."""
        copy_late = Stager._copy_late
        steps = self.cell.get("hold_copies", 0)
        done = not steps

        def held(stager: Stager, job: Any) -> None:
            nonlocal done
            if job.copies and not done:
                done, before = True, {iteration for iteration, _ in self.losses}
                deadline = time.monotonic() + 60
                while not job.awaited.is_set():
                    later = {iteration for iteration, _ in list(self.losses)} - before
                    if len(later) > steps:  # the forward after these steps
                        break
                    assert time.monotonic() < deadline, "training does not continue"
                    time.sleep(0.001)
            copy_late(stager, job)

        Stager._copy_late = held
        try:
            yield
        finally:
            Stager._copy_late = copy_late

    def add_scalar(self, name: str, *_: Any, **__: Any) -> None:
        self.scalars.append(name)

    def __getattr__(self, name: str) -> Any:  # the rest of TensorBoard's writer
        return lambda *args, **kwargs: None


def load_by_either_name(load: Any, *args: Any, **kwargs: Any) -> Any:
    return load(*([kwargs.pop("model")] if "model" in kwargs else []), *args, **kwargs)


def run(cell: dict[str, Any], store: dist.Store) -> None:
    for source, destination, iteration in cell.get("copy", ()):
        if RANK == 0:
            truncated_copy(Path(source), Path(destination), iteration)
    use(cell["entry_point"])
    recorder = Recorder(cell)
    sys.argv = [*COMMAND_LINE, *cell["arguments"]]
    load_checkpoint = training.load_checkpoint
    if cell["entry_point"] == "stock":
        # Megatron 0.17.1 upcycles by a parameter name that its own function does not have.
        training.load_checkpoint = functools.partial(load_by_either_name, load_checkpoint)
    training._STARTUP_TIMESTAMPS["program_start"] = None
    training._TRAIN_START_TIME = training._LEGACY_TRAIN_START_TIME = time.time()
    ended: Any = "end"
    handler = logging.StreamHandler(recorder.logged)
    loggers = [logging.getLogger(name) for name in ("megatron_flashckpt", "megatron.core.timers")]
    for logger in loggers:
        logger.addHandler(handler)
    homes = {
        id(m): (m, dict(vars(m))) for module, _ in HOOKS for m in (module, checkpointing, training)
    }
    for module, name in HOOKS:
        recorder.hook(module, name)
    stand_in = STAND_INS.get(cell.get("stand_in"), contextlib.nullcontext)
    with contextlib.redirect_stdout(recorder.output), stand_in(), recorder.held_copies():
        try:
            tiny.train(datasets, recorder.model_provider, recorder.forward_step, store=store)
        except SystemExit as end:
            ended = ["exit", end.code]
        except Exception as error:
            ended = [type(error).__name__, str(error)]
            recorder.output.write(traceback.format_exc())
        finally:
            training.load_checkpoint = load_checkpoint
            session.end()  # as at the exit of a process
            for home, names in homes.values():
                for _, name in HOOKS:
                    if name in names:
                        setattr(home, name, names[name])
            for logger in loggers:
                logger.removeHandler(handler)
    trace(
        event=cell["name"],
        entry_point=cell["entry_point"],
        ended=ended,
        losses=recorder.losses,
        iteration=getattr(checkpointing, "_LOADED_ITERATION", None),
        output=recorder.output.getvalue().rpartition("end of arguments")[2],
        logged=recorder.logged.getvalue(),
        hooks=recorder.hooks,
        scalars=sorted(set(recorder.scalars)),
    )


def forget() -> None:
    """Discard all state of a job."""
    if dist.is_initialized():
        dist.barrier()
    training.destroy_global_state()
    if dist.is_initialized():
        dist.destroy_process_group()
    checkpointing._CHECKPOINT_VERSION = checkpointing._LOADED_ITERATION = None
    training.num_checkpoints_memory_reported = 0
    gc.collect()


def main() -> None:
    cheap_stock.keep_help()
    cheap_stock.fork_queues()
    _, all_cells = cells.begin()
    for cell, store in all_cells:
        run(cell, store)
        forget()


if __name__ == "__main__":
    main()
