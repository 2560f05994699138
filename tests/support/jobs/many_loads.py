"""One Megatron job that calls `load_checkpoint` and `save_checkpoint` many times.

Run by `tests/support/megatron_jobs.py`. Starting Megatron costs most of a test's time, so one job
runs many cases. `CASES` is a JSON file with a list of `{"name", "args": {...}, "call": "load"}`;
other calls are `save`, and `train`, the first call of a job without a load.
Further fields:

- `args` are set on Megatron's arguments before the call, `config` on our settings, `config_on` by
  rank.
- A save with `then_load` copies slowly, and that directory is loaded as soon as the save returns.
- Before the call of a case with `then_load` or `spoiled`, all weights change.
- On rank `no_tracker_on` the file system does not show Megatron the tracker in `load` yet.
- With `trouble` `{"on", "errno", "times", "name"}`, the next reads of files of that name fail on
  rank `on`.

The result of each call on each rank is appended to `TRACE_DIR/rank_<r>.jsonl`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.training import checkpointing, get_args
from megatron.training.training import setup_model_and_optimizer

from megatron_flashckpt.async_utils import maybe_finalize_async_save
from megatron_flashckpt.checkpointing import load_checkpoint, save_checkpoint
from megatron_flashckpt.config import Config
from megatron_flashckpt.save.session import session
from megatron_flashckpt.save.stager import Stager
from megatron_flashckpt.storage import retrying_store
from scripts import pretrain_gpt_tiny as tiny
from tests.support.jobs.traces import trace

RANK = int(os.environ["RANK"])


copy_late = Stager._copy_late


def copy_slowly(self: Stager, job: Any) -> None:
    time.sleep(0.5)
    copy_late(self, job)


read_file = os.preadv


def read_with(trouble: dict[str, Any] | None) -> Any:
    """Return `os.preadv`, or a version of it that fails as on a faulty server."""
    if trouble is None or trouble["on"] != RANK:
        return read_file
    left = [trouble["times"]]

    def refuse(fd: int, *rest: Any) -> int:
        if left[0] and trouble["name"] in os.readlink(f"/proc/self/fd/{fd}"):
            left[0] -= 1
            raise OSError(trouble["errno"], os.strerror(trouble["errno"]))
        return read_file(fd, *rest)

    return refuse


checkpoint_exists = checkpointing.checkpoint_exists


def exists_unless(hidden: str | None, directory: str) -> bool:
    """Return Megatron's answer; False for the directory whose tracker is not shown yet."""
    return directory != hidden and checkpoint_exists(directory)


def weights_digest(model: list[torch.nn.Module]) -> str:
    digest = hashlib.sha256()
    for chunk in model:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def state_digest(model: list[torch.nn.Module], optimizer: Any) -> str:
    """Return a digest of all state that a load sets: weights, optimizer state, random state."""
    digest = hashlib.sha256(weights_digest(model).encode())
    for sub in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in sub.optimizer.state.values():
            for name, value in sorted(state.items()):
                held = value.detach().view(-1).view(torch.uint8).numpy().tobytes()
                digest.update(name.encode() + held)
        for group in sub.optimizer.param_groups:
            # The rate is left out: Megatron's scheduler adds up the steps of all its loads.
            settings = {key: value for key, value in group.items() if key not in ("params", "lr")}
            digest.update(repr(sorted(settings.items())).encode())
        for masters in getattr(sub, "shard_fp32_from_float16_groups", []):
            for master in masters:
                digest.update(master.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    tiny.initialize()
    args = get_args()
    load, args.load = args.load, None
    model, optimizer, scheduler = setup_model_and_optimizer(
        model_provider_func=tiny.model_provider, model_type=tiny.ModelType.encoder_or_decoder
    )
    args.load = load
    original = copy.copy(vars(args))
    retrying_store.PAUSES_S, retrying_store.UNTIL_DEADLINE = (0.01, 0.02, 0.03), ()
    for case in json.loads(Path(os.environ["CASES"]).read_text()):
        vars(args).clear()
        vars(args).update({**original, **case["args"]})
        runtime_dir = os.environ["FLASHCKPT_RUNTIME_DIR"]
        # No agent outlives its test.
        settings = {"runtime_dir": runtime_dir, "agent": {"keep_unwritten_s": 0}}
        settings |= case.get("config", {})
        settings |= case.get("config_on", {}).get(str(RANK), {})
        session.config = msgspec.convert(settings, Config)
        os.preadv = read_with(case.get("trouble"))
        hidden = args.load if case.get("no_tracker_on") == RANK else None
        checkpointing.checkpoint_exists = functools.partial(exists_unless, hidden)
        Stager._copy_late = copy_slowly if "then_load" in case else copy_late
        if "then_load" in case or case.get("spoiled"):  # weights unlike those of any other case
            for chunk in model:
                for parameter in chunk.parameters():
                    parameter.data.add_(1)
        before = weights_digest(model)
        result, error = None, None
        try:
            if case["call"] == "load":
                strict = case.get("strict", True)
                result = load_checkpoint(model, optimizer, scheduler, strict=strict)[0]
            elif case["call"] == "train":  # Megatron's loop calls this first
                maybe_finalize_async_save(blocking=False)
            else:
                save_checkpoint(case["iteration"], model, optimizer, scheduler, 0)
                if "then_load" in case:
                    args.load = case["then_load"]
                    load_checkpoint(model, optimizer, scheduler)
                outcomes = session.checkpointer(args.save).wait()
                result = [outcome.error for outcome in outcomes]
        except Exception as failure:
            error = [type(failure).__name__, str(failure)]
        trace(
            event=case["name"],
            result=result,
            error=error,
            weights=[before, weights_digest(model)],
            weights_changed=weights_digest(model) != before,
            state=state_digest(model, optimizer),
        )
        session.close(leave=True)  # cases must not see each other's memory
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
