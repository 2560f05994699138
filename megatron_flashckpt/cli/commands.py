"""Command line: inspect, verify, prune and convert a save directory; check the configuration.

No command needs a GPU. Only `convert` needs torch; only `convert` and `prune` change files,
`save-now` asks a job, and `config check --save` removes what it writes. Results go to stdout; each
error is one line on stderr. Exit status: 0 success; 1 the checkpoint is damaged or missing, or the
command failed; 2 wrong usage or configuration; 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console

from megatron_flashckpt import __version__
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.summary import FileSummary, Summary, TensorSummary, summary_of
from megatron_flashckpt.catalog.verify import nbytes_to_read, verify
from megatron_flashckpt.cli import config_check, convert, ls, plan, prune, report, save_now
from megatron_flashckpt.cli.console import (
    PIPE_COLUMNS,
    Columns,
    busy,
    complain,
    counted,
    human_size,
    is_pipe,
    json_help,
    log_as_complaints,
    print_facts,
    print_table,
    print_titles,
    printable,
    progress_bar,
    save_argument,
    say,
    table_lines,
)
from megatron_flashckpt.config import load_config
from megatron_flashckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    FlashCkptError,
    NotCommittedError,
    for_command,
)
from megatron_flashckpt.file_format.file_names import iteration_dir, run_of
from megatron_flashckpt.storage.store import Store


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
    # Rich assumes 80 columns for a pipe, in which tables have all their columns.
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    out = Console(markup=False, emoji=False, highlight=False, soft_wrap=True, width=width)
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
    directory.add_argument(
        "directory", metavar="DIR", help="save directory (Megatron's --save), or the URL of a copy"
    )
    iteration_help = "iteration to read; default: the one that the tracker names, else the newest"

    ls.add_parser(subparsers, directory)

    inspect = subparsers.add_parser(
        "inspect", parents=[directory], help="show the tensors and files of one checkpoint"
    )
    inspect.add_argument("--iteration", type=_iteration, metavar="N", help=iteration_help)
    inspect.add_argument("--json", action="store_true", help=json_help(Summary))
    inspect.set_defaults(run=_inspect)

    check = subparsers.add_parser(
        "verify", parents=[directory], help="read a checkpoint and check every byte"
    )
    selection = check.add_mutually_exclusive_group()
    selection.add_argument("--iteration", type=_iteration, metavar="N", help=iteration_help)
    selection.add_argument(
        "--all", action="store_true", help="verify every committed checkpoint in DIR"
    )
    check.add_argument("--json", action="store_true", help=json_help(list[Verdict]))
    check.set_defaults(run=_verify)

    prune.add_parser(subparsers, directory)
    save_now.add_parser(subparsers, directory)

    agent = subparsers.add_parser(
        "agent",
        help="run this node's agent for a save directory: as a Slurm step, a systemd unit or a "
        "sidecar container",
        description="Run this node's agent for a save directory. The agent takes its settings from "
        "FLASHCKPT_CONFIG and FLASHCKPT_* variables, as trainers do.",
    )
    agent.add_argument(
        "--save",
        type=save_argument,
        required=True,
        metavar="DIR",
        help="save directory (Megatron's --save)",
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

    config_check.add_parser(subparsers)
    return parser


def _iteration(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not an iteration")
    return int(text)


def _inspect(args: argparse.Namespace, out: Console) -> int:
    with busy("reading the manifest"):
        store = listing.save_directory(args.directory)
        iteration = args.iteration
        if iteration is None:
            iteration = listing.chosen_iteration(store)
        summary = summary_of(open_checkpoint(store, iteration))
    if args.json:
        say(out, json.dumps(msgspec.to_builtins(summary), indent=2))
        return 0
    metrics = (f"{name}: {value:g}" for name, value in summary.metrics.items())
    facts = {
        "checkpoint": summary.place,
        "save": f"{summary.save_id}, format version {summary.version}",
        "run": _run(summary),
        "tracker": "names this checkpoint" if summary.tracked else "does not name this checkpoint",
        "size": f"{human_size(summary.nbytes)} in {counted(len(summary.files), 'file')}",
        **({"metrics": ", ".join(metrics)} if summary.metrics else {}),
        **{name: str(value) for name, value in summary.description.items() if value is not None},
    }
    print_facts(out, facts)
    _print_tensors(summary.tensors, out)
    out.print()
    print_table(out, _tables_of_files(summary.files))
    return 0


def _run(summary: Summary) -> str:
    """Return the run of the save, and the runs from which it descends."""
    descent = ", ".join(
        f"{ancestor.run} up to iteration {ancestor.left_at}" for ancestor in summary.ancestors
    )
    return f"{run_of(summary.save_id)}, which continues {descent or 'no other run'}"


def _print_tensors(tensors: Sequence[TensorSummary], out: Console) -> None:
    """Print a row per tensor; on a terminal each key has a line of its own, above its tensors."""
    columns = {
        "kind": [tensor.kind for tensor in tensors],
        "key": [tensor.key for tensor in tensors],
        "dtype": [tensor.dtype for tensor in tensors],
        "global shape": [str(list(tensor.global_shape)) for tensor in tensors],
        "size": [human_size(tensor.nbytes) for tensor in tensors],
        "pieces": [str(tensor.pieces) for tensor in tensors],
    }
    if is_pipe(out):
        print_table(out, [columns])
        return
    keys = columns.pop("key")
    titles, *rows = table_lines(columns, out)
    print_titles(out, f"key\n  {titles}")
    for key, group in itertools.groupby(zip(keys, rows, strict=True), key=lambda pair: pair[0]):
        say(out, "\n  ".join([printable(key, out.encoding), *(row for _, row in group)]))


def _tables_of_files(files: Sequence[FileSummary]) -> Iterator[Columns]:
    """Yield tables of shard files: one with all columns, then those for narrow terminals."""
    places = [msgspec.structs.asdict(file.coordinates) for file in files]
    columns = {
        "rank": [str(file.rank) for file in files],
        "at": [" ".join(f"{name}{number}" for name, number in at.items()) for at in places],
        "file": [file.file for file in files],
        "size": [human_size(file.nbytes) for file in files],
        "pieces": [str(file.pieces) for file in files],
    }
    yield columns
    for name in ("pieces", "rank"):  # the name of a file has the rank
        del columns[name]
        yield columns


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Damage of a checkpoint, as `verify --json` prints it."""

    state: str
    """`damaged`, or `unreadable` if storage refused a read."""
    message: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one checkpoint, as `verify --json` prints it."""

    iteration: int
    directory: str
    intact: bool
    files: int | None
    """Shard files that were read; None if the manifest cannot be read."""
    nbytes: int | None
    problems: list[Problem]


def _verify(args: argparse.Namespace, out: Console) -> int:
    store = listing.save_directory(args.directory)
    if args.all:
        iterations = listing.loadable_iterations(store)
    elif args.iteration is not None:
        iterations = [args.iteration]
    else:
        iterations = [listing.chosen_iteration(store)]
    verdicts = []
    for iteration in iterations:
        verdict = _verdict(store, iteration, among_others=args.all)
        verdicts.append(verdict)
        if not args.json:
            _print_verdict(verdict, out)
    if args.json:
        say(out, json.dumps(msgspec.to_builtins(verdicts), indent=2))
    return 0 if all(verdict.intact for verdict in verdicts) else 1


def _verdict(store: Store, iteration: int, among_others: bool) -> Verdict:
    """Return the result for one checkpoint, after reading all of it.

    Args:
        among_others: a missing checkpoint counts as damage; else it is the command's one error.
    """
    files = nbytes = None
    try:
        with busy("reading the manifest"):
            stored = open_checkpoint(store, iteration)
    except FlashCkptError as error:
        if isinstance(error, NotCommittedError) and not among_others:
            raise
        damages = [error]
    else:
        files, nbytes = len(stored.manifest.shards), nbytes_to_read(stored)
        with progress_bar() as progress:
            task = progress.add_task(stored.directory, total=nbytes)
            damages = verify(stored, functools.partial(progress.advance, task))
    return Verdict(
        iteration=iteration,
        directory=iteration_dir(iteration),
        intact=not damages,
        files=files,
        nbytes=nbytes,
        problems=[
            Problem(
                state="damaged" if isinstance(damage, CorruptCheckpointError) else "unreadable",
                message=for_command(str(damage)),
            )
            for damage in damages
        ],
    )


def _print_verdict(verdict: Verdict, out: Console) -> None:
    for problem in verdict.problems:
        say(out, f"{problem.state}: {problem.message}")
    count = len(verdict.problems)
    words = counted(count, "problem") if count else "intact"
    amount_read = ""
    if verdict.files is not None and verdict.nbytes is not None:
        amount_read = f" ({counted(verdict.files, 'shard file')}, {human_size(verdict.nbytes)})"
    say(out, f"{verdict.directory}: {words}{amount_read}")


def _agent(args: argparse.Namespace, out: Console) -> int:
    # The other commands do without the agent's modules, so that they start quickly.
    from megatron_flashckpt.agent import foreground

    config = load_config()
    if args.foreground:
        foreground.become(args.save, config)
    with busy("waiting for the agent"):
        pid = foreground.wait_for_agent(args.save, config)
    # The pid is unknown if the agent runs in another container.
    say(out, f"{f'agent {pid}' if pid else 'an agent'} serves {args.save}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
