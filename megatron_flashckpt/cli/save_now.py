"""`flashckpt save-now`: have the job that trains save the same next iteration on all ranks."""

from __future__ import annotations

import argparse
import math
import time

from rich.console import Console

from megatron_flashckpt.agent import save_requests
from megatron_flashckpt.agent.alive import INTERVAL_S, Alive, is_live, read
from megatron_flashckpt.agent.proposals import look
from megatron_flashckpt.agent.save_requests import SaveRequest
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.cli.console import busy, human_time, say
from megatron_flashckpt.errors import FlashCkptError, SaveFailedError
from megatron_flashckpt.file_format.end import End
from megatron_flashckpt.file_format.file_names import ends_in, iteration_dir, run_of, save_of
from megatron_flashckpt.storage.store import Store

#: Looks that every agent has at the request before its iteration is trained.
_LOOKS = 2
#: Seconds after the iteration in which a file of its save must have come.
_PATIENCE_S = 60.0


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    directory: argparse.ArgumentParser,
) -> None:
    """Add `save-now` to the argparse subparsers `subparsers`.

    Args:
        directory: parser of the argument DIR.
    """
    parser = subparsers.add_parser(
        "save-now",
        parents=[directory],
        help="have the job that trains save soon: the same iteration on all ranks",
        description="Have the job that trains and saves to DIR save soon: the same iteration on "
        "all ranks, which all agents hear of in time. Waits for the checkpoint.",
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="return as soon as the save is requested"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Console) -> int:
    """Request a save, and wait until it is durable.

    Raises:
        FlashCkptError: no job trains there, or it cannot be asked; nothing was changed.
        SaveFailedError: the save has failed.
    """
    store = listing.save_directory(args.directory)
    with busy("looking for the job that trains"):
        alive = is_live(store)
    if alive is None or alive.state != "training":
        raise FlashCkptError(
            f"{args.directory}: no job trains and saves there, so none can be asked; start the job"
        )
    if not alive.looks_every_s:
        raise FlashCkptError(
            f"{args.directory}: {alive.writer} does not look for requests; its ranks have not "
            "begun to train, or an older release of this package serves it"
        )
    with busy("waiting for two iterations, whose time is measured"):
        alive = _measured(store, alive)
    ahead_s = _LOOKS * alive.looks_every_s + INTERVAL_S
    # The sign of life may be one interval of renewals old.
    steps = math.ceil((ahead_s + INTERVAL_S) / alive.step_s) + 1
    iteration = alive.trained + steps
    save_requests.put(store, alive.run, SaveRequest(iteration=iteration))
    say(out, f"iteration {iteration} will be saved, in {human_time(steps * alive.step_s)}")
    if args.no_wait:
        return 0
    with busy(f"waiting for iteration {iteration}"):
        _await_end(store, alive.run, iteration)
    say(out, f"{iteration_dir(iteration)}: saved")
    return 0


def _measured(store: Store, alive: Alive) -> Alive:
    """Return a sign of life that tells how long an iteration takes."""
    while not alive.step_s:
        time.sleep(INTERVAL_S)
        alive = _still_alive(store, alive.run)
    return alive


def _still_alive(store: Store, run: str) -> Alive:
    alive = read(store, run)
    if alive is None or alive.state != "training":
        raise FlashCkptError(f"{store.place}: run {run} has ended; ask the job's next run")
    return alive


def _await_end(store: Store, run: str, iteration: int) -> None:
    """Return when the save is durable.

    Raises:
        SaveFailedError: it has failed.
        FlashCkptError: the run has ended before, or no rank has begun the save.
    """
    passed_at: float | None = None
    while True:
        listed = [entry.name for entry in store.list(iteration_dir(iteration), sizes=False)]
        for save_id in ends_in(listed):
            ended = look(store, iteration, save_id) if run_of(save_id) == run else None
            if ended is not None and ended.end is End.COMMITTED:
                return
            if ended is not None and ended.failure is not None:
                raise SaveFailedError(
                    f"iteration {iteration} was not saved: {ended.failure.failed}"
                )
        if any(run_of(save_of(name) or "") == run for name in listed):
            passed_at = None
        elif _still_alive(store, run).trained >= iteration:
            passed_at = passed_at or time.monotonic()
            if time.monotonic() - passed_at > _PATIENCE_S:
                raise FlashCkptError(
                    f"{store.place}: no rank has saved iteration {iteration}: the request came too "
                    "late, or the loop does not look for it; ask again"
                )
        time.sleep(INTERVAL_S)
