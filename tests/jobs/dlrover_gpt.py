"""`scripts/pretrain_gpt_tiny.py` that also keeps each save as DLRover's `megatron_dist_ckpt` does.

DLRover itself needs a Megatron of early 2024, so its writer is replaced by a double: after every
save of stock's (`--ckpt-format torch`), the model files, and each rank's own shards of the
distributed optimizer, by bucket, group and position, go to the directory DLROVER_DIR. The shards
have been compared with those that `get_parameter_state` of DLRover 0.6.1 returns: they are alike.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import megatron.training.training as training
import pretrain_gpt_tiny as tiny
from megatron.core import parallel_state
from megatron.training import get_args
from megatron.training.checkpointing import get_checkpoint_name


def shards(optimizer: Any) -> dict[int, dict[int, dict[int, dict[str, Any]]]]:
    """Return the rank's shards as DLRover names them."""
    found: dict[int, dict[int, dict[int, dict[str, Any]]]] = {}
    for ranges in optimizer.gbuf_ranges:
        for of_buckets in ranges.values():
            for bucket, held in enumerate(of_buckets):
                groups = found.setdefault(bucket, {})
                for parameter in held["param_map"]:
                    group, position = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][position]
                    state = optimizer.optimizer.state[main]
                    groups.setdefault(group, {})[position] = {"param": main, **state}
    return found


def keep(iteration: int, optimizer: Any) -> None:
    root = Path(os.environ["DLROVER_DIR"])
    theirs = root / f"iter_{iteration:07d}/rank_{dist.get_rank():05d}/distrib_optim.pt"
    theirs.parent.mkdir(parents=True)
    torch.save(shards(optimizer.chained_optimizers[0]), theirs)
    if parallel_state.get_data_parallel_rank() == 0:
        model_file = Path(get_checkpoint_name(str(root), iteration))
        model_file.parent.mkdir(parents=True)
        shutil.copy(get_checkpoint_name(get_args().save, iteration), model_file)
    dist.barrier()
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))


if __name__ == "__main__":
    save = training.save_checkpoint

    @functools.wraps(save)
    def save_twice(iteration: int, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = save(iteration, model, optimizer, *args, **kwargs)
        keep(iteration, optimizer)
        return result

    training.save_checkpoint = save_twice
    training.pretrain(
        tiny.datasets_provider,
        tiny.model_provider,
        tiny.ModelType.encoder_or_decoder,
        tiny.forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
