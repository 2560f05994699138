"""`flashckpt prune`: remove the checkpoints that no retention rule keeps."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

import msgspec
from rich.console import Console

from megatron_flashckpt.agent.takeover import is_live
from megatron_flashckpt.agent_config import MOST
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.retention import removable, retire
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.cli.console import busy, human_size, json_help, say
from megatron_flashckpt.config import Retention, load_config
from megatron_flashckpt.errors import ConfigError, FlashCkptError, OtherWriterError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.storage.parallel import for_all

#: Fields of `Retention` that have an option.
_OPTIONS = ("latest", "every", "max_age_hours")


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint that no rule keeps, as `prune --json` prints it."""

    iteration: int
    save_id: str
    nbytes: int
    """Bytes of its files before the command."""
    freed_nbytes: int
    """Bytes that the command deleted; with `--dry-run` those that it would delete."""
    removed: bool
    """True if no file of the checkpoint is left."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `prune --json`."""

    directory: str
    dry_run: bool
    freed_nbytes: int
    checkpoints: list[Removal]


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    directory: argparse.ArgumentParser,
) -> None:
    """Add `prune` to the argparse subparsers `subparsers`.

    Args:
        directory: parser of the argument DIR.
    """
    parser = subparsers.add_parser(
        "prune",
        parents=[directory],
        help="remove checkpoints that no rule of the setting 'retention' keeps",
        description="Remove the checkpoints that no rule keeps. The rules are those of the "
        "setting 'retention'; an option replaces the rule of its name. 'retention.best' has no "
        "option.",
    )
    parser.add_argument("--latest", type=_count, metavar="N", help="keep the N newest checkpoints")
    parser.add_argument(
        "--every", type=_count, metavar="N", help="keep iterations that are multiples of N"
    )
    parser.add_argument(
        "--max-age-hours",
        type=_hours,
        metavar="H",
        help="keep checkpoints that were committed within H hours",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be removed; remove nothing"
    )
    parser.add_argument("--json", action="store_true", help=json_help(Result))
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours <= MOST:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours")
    return hours


def run(args: argparse.Namespace, out: Console) -> int:
    """Remove checkpoints; return 1 if a file of one of them is left.

    Raises:
        ConfigError: no rule is set.
        OtherWriterError: a job saves to the directory.
    """
    storage = listing.save_directory(args.directory)
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    rules = msgspec.structs.replace(load_config().retention, **given)
    if rules == Retention():
        raise ConfigError(
            "'retention' has no rule, so every checkpoint is kept; give a rule such as --latest 3, "
            "or set one in the file that FLASHCKPT_CONFIG names"
        )
    tracked = tracked_iteration(storage)
    if tracked is not None:
        # Only checkpoints below this one are removed, so that one which loads stays.
        tracked = _newest_whole(storage, tracked)
    context: dict[str, Any] = {"retain_interval": None, "tracked": tracked, "previous": None}
    if not args.dry_run:
        with busy("looking whether a job saves there"):
            writer = is_live(storage)
        if writer is not None:
            raise OtherWriterError(
                f"{args.directory}: nothing was removed, because {writer.writer} saves there and "
                "applies its own 'retention'; end that job first"
            )
    with busy("removing checkpoints" if not args.dry_run else "reading the checkpoints"):
        # A removal that was interrupted has moved the manifest away; `retire` completes it.
        interrupted = sorted(filter(None, map(file_names.parse_removal_name, storage.list(""))))
        chosen = [_Chosen(storage, *names, hidden=True) for names in interrupted]
        chosen += [
            _Chosen(storage, commit.iteration, commit.save_id)
            for commit in removable(storage, rules, **context)
        ]
        if not args.dry_run:
            retire(storage, rules, **context)
        removals = [checkpoint.removal(args.dry_run) for checkpoint in chosen]
    result = Result(
        directory=args.directory,
        dry_run=args.dry_run,
        freed_nbytes=sum(removal.freed_nbytes for removal in removals),
        checkpoints=removals,
    )
    if args.json:
        say(out, json.dumps(msgspec.to_builtins(result), indent=2))
    else:
        _print(result, out)
    return 0 if args.dry_run or all(removal.removed for removal in removals) else 1


def _newest_whole(storage: Storage, tracked: int) -> int:
    """Return the iteration that a load takes: `tracked`, or else the newest whole one below it.

    A checkpoint is whole if it has a valid manifest and all its files, with their lengths.
    """
    below = [number for number in listing.committed_iterations(storage) if number < tracked]
    for iteration in (tracked, *reversed(below)):
        with contextlib.suppress(FlashCkptError):  # `ls` and `verify` report the reason
            stored = listing.open_checkpoint(storage, iteration)
            if not listing.damage(stored, set(storage.list(stored.directory))):
                return iteration
    return tracked


class _Chosen:
    """Checkpoint to remove, with the bytes of its files."""

    def __init__(
        self, storage: Storage, iteration: int, save_id: str, *, hidden: bool = False
    ) -> None:
        self._storage = storage
        self._iteration = iteration
        self._save_id = save_id
        self._hidden = hidden
        """True if its manifest was moved away; the directory may have that of another save."""
        self._nbytes = sum(self._sizes())

    def removal(self, dry_run: bool) -> Removal:
        """Return what was removed, or what would be removed."""
        left = [] if dry_run else self._sizes()
        return Removal(
            iteration=self._iteration,
            save_id=self._save_id,
            nbytes=self._nbytes,
            freed_nbytes=self._nbytes - sum(left),
            removed=not dry_run and not left,
        )

    def _sizes(self) -> list[int]:
        """Return the sizes of the files that a removal deletes."""
        directory = file_names.iteration_dir(self._iteration)
        names = [
            name
            for name in self._storage.list(directory)
            if file_names.save_id_of(name) == self._save_id
            or (name == file_names.MANIFEST and not self._hidden)
        ]
        sizes = for_all(self._size, [f"{directory}/{name}" for name in names])
        return [size for size in sizes if size is not None]

    def _size(self, path: str) -> int | None:
        return self._storage.size(path) if self._storage.kind(path) == "file" else None


def _print(result: Result, out: Console) -> None:
    for removal in result.checkpoints:
        if result.dry_run:
            outcome = f"would be removed, {human_size(removal.nbytes)}"
        elif removal.removed:
            outcome = f"removed, {human_size(removal.nbytes)}"
        elif removal.freed_nbytes:
            left = human_size(removal.nbytes - removal.freed_nbytes)
            outcome = f"removed in part, {left} cannot be removed"
        else:
            outcome = "cannot be removed"
        say(out, f"{file_names.iteration_dir(removal.iteration)}: {outcome}")
    if result.checkpoints:
        verb = "would free" if result.dry_run else "freed"
        say(out, f"{verb} {human_size(result.freed_nbytes)}")
    else:
        say(out, f"{result.directory}: no checkpoint to remove")
