"""`flashckpt prune`: remove the checkpoints that no retention rule keeps."""

from __future__ import annotations

import argparse
import json

import msgspec
from rich.console import Console

from megatron_flashckpt.agent.alive import is_live
from megatron_flashckpt.agent.janitor import CommittedSave, Janitor
from megatron_flashckpt.agent_config import MOST
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.directory import later_run, read_facts
from megatron_flashckpt.catalog.iteration_files import SaveFiles
from megatron_flashckpt.catalog.lineage import History, Save, choose
from megatron_flashckpt.cli.console import busy, human_size, json_help, say
from megatron_flashckpt.config import Retention, load_config
from megatron_flashckpt.errors import ConfigError, OtherWriterError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.file_names import run_number
from megatron_flashckpt.file_format.run_object import Ancestor
from megatron_flashckpt.storage.store import Store

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
        help="keep checkpoints since whose commit the job has trained for less than H hours",
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
    store = listing.save_directory(args.directory)
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    rules = msgspec.structs.replace(load_config().retention, **given)
    if rules == Retention():
        raise ConfigError(
            "'retention' has no rule, so every checkpoint is kept; give a rule such as --latest 3, "
            "or set one in the file that FLASHCKPT_CONFIG names"
        )
    if not args.dry_run:
        with busy("looking whether a job saves there"):
            writer = is_live(store)
        if writer is not None:
            raise OtherWriterError(
                f"{args.directory}: nothing was removed, because {writer.writer} saves there and "
                "applies its own 'retention'; end that job first"
            )
    with busy("removing checkpoints" if not args.dry_run else "reading the checkpoints"):
        removals = _prune(store, rules, dry_run=args.dry_run)
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


def _prune(store: Store, rules: Retention, *, dry_run: bool) -> list[Removal]:
    """Remove what the agent of the newest run would remove, if this were its last commit."""
    choice = choose(read_facts(store))
    last = next((candidate.save for candidate in choice.candidates), None)
    if last is None or choice.history is None or not choice.history.holds(last):
        return []
    history = choice.history
    if (later := later_run(store, run_number(history.run))) is not None:
        # It has left nothing, and has ended: what a load would choose is what counts.
        history = History(later.name, (Ancestor(history.run, last.iteration), *history.ancestors))
    # No job is alive, so no node waits for an end.
    janitor = Janitor()
    save = CommittedSave(
        store=store,
        iteration=last.iteration,
        save_id=last.save_id,
        history=history,
        rules=rules,
        retain_interval=None,
        previous=None,
    )
    chosen = janitor.removable(save)
    if not dry_run:
        janitor.tidy(save)
    return [
        _removal(named, files, {} if dry_run else _sizes(store, named), dry_run=dry_run)
        for named, files in chosen
    ]


def _sizes(store: Store, named: Save) -> dict[str, int]:
    """Return the sizes of the files that a save still has."""
    listed = store.list(file_names.iteration_dir(named.iteration))
    return {
        entry.name: entry.nbytes
        for entry in listed
        if entry.kind == "file" and file_names.save_of(entry.name) == named.save_id
    }


def _removal(named: Save, files: SaveFiles, left: dict[str, int], *, dry_run: bool) -> Removal:
    return Removal(
        iteration=named.iteration,
        save_id=named.save_id,
        nbytes=sum(files.sizes.values()),
        freed_nbytes=max(0, sum(files.sizes.values()) - sum(left.values())),
        removed=not dry_run and not left,
    )


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
