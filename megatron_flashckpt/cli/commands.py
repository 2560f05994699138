"""The command line: look at a save directory, verify, prune, convert it, check the configuration.

Needs no GPU; `convert` alone needs torch, and `convert` and `prune` alone change anything. Results
go to stdout, errors as one line to stderr. Exit status: 0 all is well; 1 damage was found, or what
was asked for is not there or could not be done; 2 wrong usage or configuration.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from megatron_flashckpt import __version__
from megatron_flashckpt.agent import claim, foreground
from megatron_flashckpt.agent.takeover import is_live
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.retention import retire, superfluous
from megatron_flashckpt.catalog.tracker import tracked_iteration, tracker_text
from megatron_flashckpt.catalog.verify import nbytes_to_read, verify
from megatron_flashckpt.cli import convert, plan, report
from megatron_flashckpt.cli.console import (
    add_row,
    complain,
    human_size,
    log_as_complaints,
    new_table,
    progress_bar,
    say,
)
from megatron_flashckpt.config import Retention, load_config
from megatron_flashckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    FlashCkptError,
    NotCommittedError,
    OtherWriterError,
    for_command,
)
from megatron_flashckpt.file_format.file_names import MANIFEST, TRACKER, iteration_dir

_PIPE_COLUMNS = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status (wrong usage raises SystemExit(2))."""
    args = _parser().parse_args(argv)
    if sys.stdout is None:  # the shell has closed it: `flashckpt ls DIR >&-`
        return complain("standard output is closed; nothing was done", 1)
    # In a pipe no table is squeezed to the 80 columns of a terminal that is not there.
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    out = Console(markup=False, highlight=False, soft_wrap=True, width=width)
    try:
        with log_as_complaints():
            status: int = args.run(args, out)
    except ConfigError as error:
        return complain(str(error), 2)
    except (FlashCkptError, OSError) as error:
        return complain(str(error), 1)
    except KeyboardInterrupt:
        return complain("interrupted", 130)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashckpt", description="Inspect, verify and convert checkpoints of Megatron-LM jobs."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    directory = argparse.ArgumentParser(add_help=False)
    directory.add_argument("directory", metavar="DIR", help="save directory (Megatron's --save)")
    chosen = "default: the one that the tracker names, else the newest"

    ls = commands.add_parser("ls", parents=[directory], help="list all checkpoints of DIR")
    ls.set_defaults(run=_ls)

    inspect = commands.add_parser("inspect", parents=[directory], help="show what one holds")
    inspect.add_argument("--iteration", type=_iteration, metavar="N", help=chosen)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    check = commands.add_parser("verify", parents=[directory], help="read and check every byte")
    which = check.add_mutually_exclusive_group()
    which.add_argument("--iteration", type=_iteration, metavar="N", help=chosen)
    which.add_argument("--all", action="store_true", help="all committed checkpoints of DIR")
    check.set_defaults(run=_verify)

    prune = commands.add_parser(
        "prune",
        parents=[directory],
        help="remove the checkpoints that no rule of the setting 'retention' keeps",
    )
    prune.add_argument("--dry-run", action="store_true", help="say which, and remove nothing")
    prune.set_defaults(run=_prune)

    agent = commands.add_parser(
        "agent",
        help="run the agent of this node for a save directory: as a Slurm step, a systemd unit or "
        "a sidecar container; settings come from the configuration, as those of trainers do",
    )
    agent.add_argument(
        "--save", required=True, metavar="DIR", help="save directory (Megatron's --save)"
    )
    how = agent.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--foreground",
        action="store_true",
        help="serve trainers until SIGTERM (what is staged is finished first) or until none has "
        "come for 'agent.grace_s' seconds",
    )
    how.add_argument(
        "--wait",
        action="store_true",
        help="return when an agent of this node answers, at most 'agent.start_timeout_s' seconds",
    )
    agent.set_defaults(run=_agent)

    convert.add_parser(commands, _iteration)
    plan.add_parser(commands)
    report.add_parser(commands)

    config = commands.add_parser("config", help="settings").add_subparsers(
        required=True, metavar="COMMAND"
    )
    config_check = config.add_parser(
        "check", help="print the settings in effect: defaults, FILE, environment"
    )
    config_check.add_argument(
        "file", metavar="FILE", nargs="?", help="default: the file that FLASHCKPT_CONFIG names"
    )
    config_check.set_defaults(run=_config_check)
    return parser


def _iteration(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not an iteration")
    return int(text)


def _ls(args: argparse.Namespace, out: Console) -> int:
    storage = listing.save_directory(args.directory)
    found = listing.checkpoints(storage)
    tracker, tracked = tracker_text(storage), tracked_iteration(storage)
    named = tracker if tracked is None else iteration_dir(tracked)
    kept_by = report.kept_by(storage, tracked)
    if found:
        columns = ["", "iteration", "state", "ranks", "size", "layout", "remark"]
        if kept_by is not None:
            columns.insert(-1, "kept by")
        table = new_table(*columns)
        for one in found:
            marker = "*" if one.directory == named else ""
            number = one.directory if one.iteration is None else str(one.iteration)
            ranks = "" if one.ranks is None else str(one.ranks)
            size = "" if one.nbytes is None else human_size(one.nbytes)
            cells = [marker, number, one.state, ranks, size, one.layout, one.remark]
            if kept_by is not None:
                why = kept_by.get(-1 if one.iteration is None else one.iteration)
                cells.insert(-1, "" if why is None else ", ".join(why) or "nothing")
            add_row(table, out, *cells)
        out.print(table)
    else:
        say(out, f"{args.directory}: holds no checkpoints")
    if tracker is None:
        if found:
            say(out, f"no {TRACKER}: a job would start from scratch")
    elif named in {one.directory for one in found}:
        say(out, f"* named by {TRACKER}")
    else:
        say(out, f"{TRACKER} names {tracker!r}, which is not here")
    if (writer := claim.read(storage)) is not None:
        say(out, f"claimed by {writer.writer}{claim.DOING[writer.state]}")
    return 0


def _inspect(args: argparse.Namespace, out: Console) -> int:
    storage = listing.save_directory(args.directory)
    iteration = args.iteration
    if iteration is None:
        iteration = listing.chosen_iteration(storage)
    summary = listing.summary(listing.open_checkpoint(storage, iteration))
    if args.json:
        say(out, json.dumps(msgspec.to_builtins(summary), indent=2))
        return 0
    facts = {
        "checkpoint": summary.place,
        "save": f"{summary.save_id}, format version {summary.version}",
        "tracker": "names it" if summary.tracked else "does not name it",
        "size": f"{human_size(summary.nbytes)} in {len(summary.files)} files",
        **({"copies differ": ", ".join(summary.differing)} if summary.differing else {}),
        **{name: str(said) for name, said in summary.description.items() if said is not None},
    }
    table = new_table("", "")
    table.show_header = False
    for name, said in facts.items():
        add_row(table, out, name, said)
    out.print(table)
    out.print()
    table = new_table("kind", "key", "dtype", "global shape", "size", "pieces")
    for it in summary.tensors:
        shape = str(list(it.global_shape))
        add_row(table, out, it.kind, it.key, it.dtype, shape, human_size(it.nbytes), str(it.pieces))
    out.print(table)
    out.print()
    table = new_table("rank", "at", "file", "size", "pieces")
    for file in summary.files:
        at = msgspec.structs.asdict(file.coordinates)
        place = " ".join(f"{name}{number}" for name, number in at.items())
        add_row(
            table, out, str(file.rank), place, file.file, human_size(file.nbytes), str(file.pieces)
        )
    out.print(table)
    return 0


def _verify(args: argparse.Namespace, out: Console) -> int:
    storage = listing.save_directory(args.directory)
    if args.all:
        iterations = listing.loadable_iterations(storage)
    elif args.iteration is not None:
        iterations = [args.iteration]
    else:
        iterations = [listing.chosen_iteration(storage)]
    intact = True
    for iteration in iterations:
        name = iteration_dir(iteration)
        try:
            stored = listing.open_checkpoint(storage, iteration)
        except FlashCkptError as error:
            # Of a checkpoint that was asked for by number, absence is no damage but a mistake.
            if isinstance(error, NotCommittedError) and not args.all:
                raise
            damages, read = [error], ""
        else:
            with progress_bar() as progress:
                task = progress.add_task(name, total=nbytes_to_read(stored))
                damages = verify(stored, functools.partial(progress.advance, task))
            files = len(stored.manifest.shards)
            read = f" ({files} shard files, {human_size(nbytes_to_read(stored))})"
        for damage in damages:
            word = "damaged" if isinstance(damage, CorruptCheckpointError) else "unreadable"
            say(out, f"{word}: {for_command(str(damage))}")
        plural = "s" if len(damages) > 1 else ""
        verdict = f"{len(damages)} problem{plural}" if damages else "intact"
        say(out, f"{name}: {verdict}{read}")
        intact = intact and not damages
    return 0 if intact else 1


def _prune(args: argparse.Namespace, out: Console) -> int:
    storage, rules = listing.save_directory(args.directory), load_config().retention
    if rules == Retention():
        raise ConfigError(
            "'retention' has no rule, so every checkpoint is kept; set one in the file that "
            "FLASHCKPT_CONFIG names, or e.g. FLASHCKPT_RETENTION__LATEST=3"
        )
    which: dict[str, Any] = {
        "retain_interval": None,
        "tracked": tracked_iteration(storage),
        "previous": None,
    }
    if not args.dry_run and (writer := is_live(storage)) is not None:
        raise OtherWriterError(
            f"{args.directory}: {writer.writer} saves there, and removes by itself what its own "
            "'retention' does not keep; nothing was removed. End that job first"
        )
    doomed = [iteration_dir(commit.iteration) for commit in superfluous(storage, rules, **which)]
    stay: list[str] = []
    if not args.dry_run:
        retire(storage, rules, **which)
        stay = [name for name in doomed if storage.kind(f"{name}/{MANIFEST}") is not None]
    for name in doomed:
        removed = "would be removed" if args.dry_run else "removed"
        say(out, f"{name}: {'cannot be removed' if name in stay else removed}")
    if not doomed:
        say(out, f"{args.directory}: every checkpoint is kept by a rule")
    return 1 if stay else 0


def _agent(args: argparse.Namespace, out: Console) -> int:
    if args.foreground:
        foreground.become(args.save, load_config())
    pid = foreground.wait_for_agent(args.save, load_config())
    # Not seen from here in another container.
    say(out, f"{f'agent {pid}' if pid else 'an agent'} serves {args.save}")
    return 0


def _config_check(args: argparse.Namespace, out: Console) -> int:
    say(out, msgspec.yaml.encode(load_config(args.file)).decode().rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
