"""`flashckpt save-now`: have the job that trains save the same next iteration on all ranks."""

from __future__ import annotations

import argparse
import contextlib
import math
import time

from rich.console import Console

from megatron_flashckpt.agent.alive import INTERVAL_S, Alive, Observation, is_live
from megatron_flashckpt.agent.proposals import look
from megatron_flashckpt.agent.save_requests import first_after, requests
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.cli.console import busy, human_time, say
from megatron_flashckpt.errors import AlreadyExistsError, FlashCkptError, SaveFailedError
from megatron_flashckpt.file_format.file_names import (
    first_sequence,
    iteration_dir,
    request_file,
    save_name,
    save_of,
)
from megatron_flashckpt.storage.store import Store

#: Looks that every agent has at the request before its iteration is trained.
_LOOKS = 2
#: Seconds within which a loop tells its iterations, and a save begins after its iteration.
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
    training = _Run(store, alive.run)
    with busy("measuring how long an iteration takes"):
        alive = _measured(training)
    iteration = first_after(requests(store, alive.run), alive.trained)
    if iteration:  # a second request might come between the first one and its iteration
        say(out, f"iteration {iteration} is requested already")
    else:
        # The sign of life may be one interval of renewals old.
        ahead_s = _LOOKS * alive.looks_every_s + 2 * INTERVAL_S
        steps = math.ceil(ahead_s / alive.step_s) + 1
        iteration = alive.trained + steps
        with contextlib.suppress(AlreadyExistsError):  # another command has asked for the same
            store.create(request_file(alive.run, iteration), b"")
        about = human_time(steps * alive.step_s)
        say(out, f"iteration {iteration} will be saved, in {about} or later")
    if args.no_wait:
        return 0
    with busy(f"waiting for iteration {iteration}"):
        _await_end(training, iteration)
    say(out, f"{iteration_dir(iteration)}: saved")
    return 0


class _Run:
    """A run that trained when the command began."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.name = store, run
        self._observation = Observation(store, run)

    def look(self, otherwise: str) -> Alive:
        """Return its sign of life.

        Raises:
            FlashCkptError: the run has ended, was killed or is silent; `otherwise` says the rest.
        """
        alive = self._observation.look()
        if alive is None:
            raise FlashCkptError(f"{self.store.place}: run {self.name} has ended{otherwise}")
        return alive


def _measured(run: _Run) -> Alive:
    """Return a sign of life that tells how long an iteration takes.

    Raises:
        FlashCkptError: the run has ended, or its loop does not tell its iterations.
    """
    since = time.monotonic()
    while True:
        alive = run.look("; ask the job's next run")
        if alive.step_s and alive.looks_every_s:
            return alive
        if not alive.trained and time.monotonic() - since > _PATIENCE_S:
            raise FlashCkptError(
                f"{run.store.place}: {alive.writer} has told no iteration for {_PATIENCE_S:.0f} s: "
                "its first one takes long, or its loop does not take requests (see 'A save now' in "
                "docs/how-to/save-interval.md)"
            )
        time.sleep(INTERVAL_S)


def _await_end(run: _Run, iteration: int) -> None:
    """Return when the save is durable.

    Raises:
        SaveFailedError: it has failed.
        FlashCkptError: the run has ended before, or no rank has begun the save.
    """
    store, save_id = run.store, save_name(run.name, first_sequence(iteration))
    passed_at: float | None = None
    silence: FlashCkptError | None = None
    while True:
        try:
            alive = run.look(" without this save")
        except FlashCkptError as error:  # one more look at the files
            alive, silence = None, error
        if (ended := look(store, iteration, save_id)) is not None:
            if (failure := ended.failure) is not None:
                raise SaveFailedError(f"iteration {iteration} was not saved: {failure.failed}")
            return
        if alive is None:
            assert silence is not None
            raise silence
        listed = store.list(iteration_dir(iteration), sizes=False)
        has_begun = any(save_of(entry.name) == save_id for entry in listed)
        if has_begun or alive.is_saving or alive.trained < iteration:
            passed_at = None
        else:
            passed_at = passed_at or time.monotonic()
            if time.monotonic() - passed_at > _PATIENCE_S:
                raise FlashCkptError(
                    f"{store.place}: no rank has saved iteration {iteration}: the request came too "
                    "late; ask again"
                )
        time.sleep(INTERVAL_S)
