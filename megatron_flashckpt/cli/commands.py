"""Command line: inspect, verify, prune and convert a save directory; check the configuration.

No command needs a GPU. Only `convert` needs torch; only `convert` and `prune` change files. Results
go to stdout; each error is one line on stderr. Exit status: 0 success; 1 the checkpoint is damaged
or missing, or the command failed; 2 wrong usage or configuration; 130 interrupted.
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
from megatron_flashckpt.catalog.retention import removable, retire
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
    parser = _parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = "; write Megatron's arguments after '--'" if args.run is plan.run else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if sys.stdout is None:  # the shell closed stdout: `flashckpt ls DIR >&-`
        return complain("standard output is closed; nothing was done", 1)
    # Rich assumes 80 columns for a pipe; tables in a pipe must not be folded.
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
        prog="flashckpt",
        description="Inspect, verify, prune and convert checkpoints of Megatron-LM jobs.",
        epilog="exit status: 0 success; 1 the checkpoint is damaged or missing, or the command "
        "failed; 2 wrong usage or configuration; 130 interrupted",
    )
    parser.add_argument("-V", "--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    directory = argparse.ArgumentParser(add_help=False)
    directory.add_argument("directory", metavar="DIR", help="save directory (Megatron's --save)")
    iteration_help = "iteration to read; default: the one that the tracker names, else the newest"

    ls = subparsers.add_parser("ls", parents=[directory], help="list the checkpoints in DIR")
    ls.set_defaults(run=_ls)

    inspect = subparsers.add_parser(
        "inspect", parents=[directory], help="show the tensors and files of one checkpoint"
    )
    inspect.add_argument("--iteration", type=_iteration, metavar="N", help=iteration_help)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    check = subparsers.add_parser(
        "verify", parents=[directory], help="read a checkpoint and check every byte"
    )
    selection = check.add_mutually_exclusive_group()
    selection.add_argument("--iteration", type=_iteration, metavar="N", help=iteration_help)
    selection.add_argument(
        "--all", action="store_true", help="verify every committed checkpoint in DIR"
    )
    check.set_defaults(run=_verify)

    prune = subparsers.add_parser(
        "prune",
        parents=[directory],
        help="remove checkpoints that no rule of the setting 'retention' keeps",
    )
    prune.add_argument(
        "--dry-run", action="store_true", help="print what would be removed; remove nothing"
    )
    prune.set_defaults(run=_prune)

    agent = subparsers.add_parser(
        "agent",
        help="run this node's agent for a save directory: as a Slurm step, a systemd unit or a "
        "sidecar container",
        description="Run this node's agent for a save directory. The agent takes its settings from "
        "FLASHCKPT_CONFIG and FLASHCKPT_* variables, as trainers do.",
    )
    agent.add_argument(
        "--save", required=True, metavar="DIR", help="save directory (Megatron's --save)"
    )
    mode = agent.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--foreground",
        action="store_true",
        help="serve trainers until SIGTERM (staged checkpoints are written first), or until no "
        "trainer has connected for 'agent.grace_s' seconds",
    )
    mode.add_argument(
        "--wait",
        action="store_true",
        help="return when this node's agent answers; fail after 'agent.start_timeout_s' seconds",
    )
    agent.set_defaults(run=_agent)

    convert.add_parser(subparsers, _iteration)
    plan.add_parser(subparsers)
    report.add_parser(subparsers)

    config = subparsers.add_parser("config", help="check the settings").add_subparsers(
        required=True, metavar="COMMAND"
    )
    config_check = config.add_parser(
        "check",
        help="print the effective settings: defaults, then FILE, then environment variables",
    )
    config_check.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="YAML file; default: the file that FLASHCKPT_CONFIG names",
    )
    config_check.set_defaults(run=_config_check)
    return parser


def _iteration(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not an iteration")
    return int(text)


def _ls(args: argparse.Namespace, out: Console) -> int:
    storage = listing.save_directory(args.directory)
    entries = listing.checkpoints(storage)
    tracker, tracked = tracker_text(storage), tracked_iteration(storage)
    tracked_name = tracker if tracked is None else iteration_dir(tracked)
    kept_by = report.kept_by(storage, tracked)
    if entries:
        columns = ["", "iteration", "state", "ranks", "size", "layout", "remark"]
        if kept_by is not None:
            columns.insert(-1, "kept by")
        table = new_table(*columns)
        for entry in entries:
            marker = "*" if entry.directory == tracked_name else ""
            label = entry.directory if entry.iteration is None else str(entry.iteration)
            ranks = "" if entry.ranks is None else str(entry.ranks)
            size = "" if entry.nbytes is None else human_size(entry.nbytes)
            cells = [marker, label, entry.state, ranks, size, entry.layout, entry.remark]
            if kept_by is not None:
                rules = kept_by.get(-1 if entry.iteration is None else entry.iteration)
                cells.insert(-1, "" if rules is None else ", ".join(rules) or "nothing")
            add_row(table, out, *cells)
        out.print(table)
    else:
        say(out, f"{args.directory}: no checkpoints")
    if tracker is None:
        if entries:
            say(out, f"{TRACKER} is missing: a job would start from scratch")
    elif tracked_name in {entry.directory for entry in entries}:
        say(out, f"* named by {TRACKER}")
    else:
        say(out, f"{TRACKER} names {tracker!r}, which is missing")
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
        "tracker": "names this checkpoint" if summary.tracked else "does not name this checkpoint",
        "size": f"{human_size(summary.nbytes)} in {len(summary.files)} files",
        **({"copies differ": ", ".join(summary.differing)} if summary.differing else {}),
        **{name: str(value) for name, value in summary.description.items() if value is not None},
    }
    table = new_table("", "")
    table.show_header = False
    for name, value in facts.items():
        add_row(table, out, name, value)
    out.print(table)
    out.print()
    table = new_table("kind", "key", "dtype", "global shape", "size", "pieces")
    for tensor in summary.tensors:
        shape = str(list(tensor.global_shape))
        add_row(
            table,
            out,
            tensor.kind,
            tensor.key,
            tensor.dtype,
            shape,
            human_size(tensor.nbytes),
            str(tensor.pieces),
        )
    out.print(table)
    out.print()
    table = new_table("rank", "at", "file", "size", "pieces")
    for file in summary.files:
        coordinates = msgspec.structs.asdict(file.coordinates)
        place = " ".join(f"{name}{number}" for name, number in coordinates.items())
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
            # Only --all counts a missing checkpoint as damage; else it is the command's one error.
            if isinstance(error, NotCommittedError) and not args.all:
                raise
            damages, amount_read = [error], ""
        else:
            with progress_bar() as progress:
                task = progress.add_task(name, total=nbytes_to_read(stored))
                damages = verify(stored, functools.partial(progress.advance, task))
            files = len(stored.manifest.shards)
            amount_read = f" ({files} shard files, {human_size(nbytes_to_read(stored))})"
        for damage in damages:
            adjective = "damaged" if isinstance(damage, CorruptCheckpointError) else "unreadable"
            say(out, f"{adjective}: {for_command(str(damage))}")
        plural = "s" if len(damages) > 1 else ""
        verdict = f"{len(damages)} problem{plural}" if damages else "intact"
        say(out, f"{name}: {verdict}{amount_read}")
        intact = intact and not damages
    return 0 if intact else 1


def _prune(args: argparse.Namespace, out: Console) -> int:
    storage, rules = listing.save_directory(args.directory), load_config().retention
    if rules == Retention():
        raise ConfigError(
            "'retention' has no rule, so every checkpoint is kept; set a rule in the file that "
            "FLASHCKPT_CONFIG names, or with a variable such as FLASHCKPT_RETENTION__LATEST=3"
        )
    context: dict[str, Any] = {
        "retain_interval": None,
        "tracked": tracked_iteration(storage),
        "previous": None,
    }
    if not args.dry_run and (writer := is_live(storage)) is not None:
        raise OtherWriterError(
            f"{args.directory}: nothing was removed, because {writer.writer} saves there and "
            "applies its own 'retention'; end that job first"
        )
    candidates = [
        iteration_dir(commit.iteration) for commit in removable(storage, rules, **context)
    ]
    remaining: list[str] = []
    if not args.dry_run:
        retire(storage, rules, **context)
        remaining = [name for name in candidates if storage.kind(f"{name}/{MANIFEST}") is not None]
    for name in candidates:
        removed = "would be removed" if args.dry_run else "removed"
        say(out, f"{name}: {'cannot be removed' if name in remaining else removed}")
    if not candidates:
        say(out, f"{args.directory}: no checkpoint to remove")
    return 1 if remaining else 0


def _agent(args: argparse.Namespace, out: Console) -> int:
    if args.foreground:
        foreground.become(args.save, load_config())
    pid = foreground.wait_for_agent(args.save, load_config())
    # The pid is unknown if the agent runs in another container.
    say(out, f"{f'agent {pid}' if pid else 'an agent'} serves {args.save}")
    return 0


def _config_check(args: argparse.Namespace, out: Console) -> int:
    say(out, msgspec.yaml.encode(load_config(args.file)).decode().rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
