"""The tiny GPT, whose training function fails and is entered again in the same process.

The calls and their order are those of Megatron's own `--inprocess-restart` under the `Wrapper` of
nvidia-resiliency-ext: abort (destroy the process groups), finalize (`destroy_state`), then the next
attempt, with a prefix of its own in the job's store.

`FAILS` is a JSON list with one entry per attempt that fails: `{"save": N, "on": "before" | "after",
"rank": R}`. In the save of iteration N rank R raises before it saves, the others after they have.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from megatron.training import training
from megatron.training.inprocess_restart import destroy_state

from scripts import pretrain_gpt_tiny as tiny

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FAILS = json.loads(os.environ["FAILS"])


class Abort(Exception):
    """The error for which an attempt ends."""


def held() -> str:
    """Return what this process holds of saves: threads, shared memory and connections."""
    gc.collect()
    threads = sorted(
        thread.name for thread in threading.enumerate() if thread.name.startswith("flashckpt")
    )
    files = Path("/proc/self/map_files").iterdir()
    slabs = {os.readlink(file) for file in files if "memfd:flashckpt" in os.readlink(file)}
    sockets = len(psutil.Process().net_connections("unix"))  # Megatron's are TCP
    return f"{threads} {len(slabs)} slabs {sockets} sockets"


def failing(save: Any, fails: dict[str, Any] | None) -> Any:
    """Return Megatron's `save_checkpoint`, which raises as `fails` says."""

    @functools.wraps(save)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> None:
        is_due = fails is not None and iteration == fails["save"]
        if is_due and fails["rank"] == RANK:
            raise Abort
        save(iteration, *args, **kwargs)
        if is_due:
            raise Abort
        print(f"rank {RANK} after save {iteration} holds {held()}", flush=True)

    return save_checkpoint


def main() -> None:
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), RANKS, is_master=RANK == 0
    )
    save = training.save_checkpoint
    for attempt, fails in enumerate([*FAILS, None]):
        training.save_checkpoint = failing(save, fails)
        try:
            tiny.train(
                tiny.datasets_provider,
                tiny.model_provider,
                tiny.forward_step,
                store=dist.PrefixStore(str(attempt), store),
            )
        except Abort:
            dist.destroy_process_group()
            destroy_state()
            store.set(f"aborted/{attempt}/{RANK}", "")
            store.wait([f"aborted/{attempt}/{rank}" for rank in range(RANKS)])
        else:
            return


main()
