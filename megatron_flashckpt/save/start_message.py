"""The lines that rank 0 prints before the first step: where and how the job will save."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch
from megatron.core import package_info
from torch.torch_version import TorchVersion

import megatron_flashckpt
from megatron_flashckpt.config import Retention
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.size_estimate import SizeEstimate
from megatron_flashckpt.memory.host_memory import shown
from megatron_flashckpt.save import node_memory
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.node_memory import Need
from megatron_flashckpt.save.save_reports import say


def print_start(
    job: JobState,
    checkpointer: Checkpointer,
    expected: SizeEstimate,
    needs: list[Need],
    started: float,
) -> None:
    """Print on rank 0 where and how the job saves; called by all ranks before the first step.

    Args:
        started: `time.perf_counter()` when the checks began.
    """
    config = checkpointer.config
    node = node_memory.tightest_limit(needs, checkpointer.rank)
    largest = max(need.slab_nbytes for need in needs)
    needed = sum(needs[rank].nbytes for rank in node.ranks)
    ranks = f"{len(node.ranks)} rank{'s' if len(node.ranks) > 1 else ''}"
    check_s = time.perf_counter() - started
    slots = f"{config.slots} slot{'s' if config.slots > 1 else ''}"
    lines = [
        f"{megatron_flashckpt.__version__}, {job.entry_point}; megatron-core "
        f"{package_info.__version__}, torch {torch.__version__}",
        f"saves to {checkpointer.root}{_interval(job)}{_memory_saves(job)}; "
        f"{_retention(config.retention, job)}; redundancy: {config.redundancy}",
        f"host memory: {slots} of {shown(expected.nbytes)} on rank 0, at most "
        f"{shown(largest)} per rank; {shown(needed)} on this node ({ranks}) "
        f"of {shown(node.left_nbytes)} available",
        f"self-check of {len(expected.pieces)} pieces on rank 0 passed in {1000 * check_s:.0f} ms; "
        + (
            "the memory of the previous run is reused"
            if checkpointer.link.has_slab
            else "agent and memory are made ready in the background, so that the first save costs "
            "no more than later ones"
        ),
    ]
    if config.slots == 1:
        lines.append(
            "slots: 1: a save begins when the previous one is committed or has failed"
            f"{', or is skipped' if config.busy == 'skip' else ''}; a crash during its copies into "
            "host memory resumes from storage"
        )
    if job.outside_steps is not None and config.staging != "blocking":
        lines.append(
            f"each save copies everything before it returns, as with 'staging: blocking', because "
            f"{job.outside_steps} changes tensors outside of the optimizer's step"
        )
    shares = TorchVersion(torch.__version__) >= TorchVersion("2.13")
    lines += rendezvous_warning(os.environ, shares=shares)
    for line in lines:
        say(checkpointer.rank, line)


def rendezvous_warning(environ: Mapping[str, str], *, shares: bool) -> list[str]:
    """Return a line if torchrun's restarts of this job will fail, else none.

    torch 2.13 hands restarted ranks the store of the failed ones, in which gloo finds addresses of
    dead ranks. Only the environment of torchrun itself can change that.

    Args:
        shares: True if this release of torch does so by default.
    """
    shares = shares and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not shares or restarts == "0":
        return []
    return [
        f'WARNING: a restart by torchrun (--max-restarts {restarts}) will fail with "Gloo '
        'connectFullMesh failed", or hang: this torch shares its rendezvous store with restarted '
        "ranks; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts"
    ]


def _interval(job: JobState) -> str:
    interval = job.save_interval
    if not interval:
        return ""
    return " every iteration" if interval == 1 else f" every {interval} iterations"


def _memory_saves(job: JobState) -> str:
    interval = job.memory_interval
    return f", to host memory only every {interval}" if interval else ""


def _retention(rules: Retention, job: JobState) -> str:
    hours = rules.max_age_hours
    given = {
        "latest": rules.latest,
        "every": rules.every,
        "best": rules.best and f"{rules.best.keep} by '{rules.best.metric}'",
        "age below": None if hours is None else f"{hours:g} h",
        "--save-retain-interval": job.retain_interval,
    }
    kept = [f"{name} {value}" for name, value in given.items() if value is not None]
    return f"kept: {', '.join(kept) or 'all'}"
