"""`flashckpt ls`: the checkpoints of a save directory, whatever their format and state."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from megatron_flashckpt.agent import alive, log
from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.tracker import iteration_in, tracker_text
from megatron_flashckpt.cli import report
from megatron_flashckpt.cli.console import (
    Columns,
    busy,
    clock,
    human_size,
    json_help,
    print_table,
    say,
)
from megatron_flashckpt.config import load_config
from megatron_flashckpt.errors import NotCommittedError
from megatron_flashckpt.file_format.file_names import TRACKER, iteration_dir
from megatron_flashckpt.storage.opening import absolute
from megatron_flashckpt.storage.store import Store


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Iteration directory, as `ls --json` prints it."""

    directory: str
    iteration: int | None
    """None for Megatron's `release`."""
    state: str
    save_id: str | None
    """The save that counts in this directory; None if no save is committed."""
    committed_at: float | None
    """Seconds since 1970; None if no save is committed."""
    ranks: int | None
    nbytes: int | None
    layout: str
    tracked: bool
    """True if the tracker names this directory."""
    kept_by: list[str] | None
    """Rules of 'retention' that keep the checkpoint; None without rules."""
    remark: str


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """Run that trains into the save directory, or was killed, as `ls --json` prints it."""

    run: str
    host: str
    agent_pid: int
    renewed_at: float
    """Seconds since 1970 on the writer's host."""
    state: str
    """`training`, or `finishing` if only staged saves are still written."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Save directory, as `ls --json` prints it."""

    directory: str
    tracker: str | None
    """Contents of the tracker, empty if it is no file; None if it is missing."""
    checkpoints: list[Entry]
    writer: Writer | None
    """None if the newest run has ended."""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    directory: argparse.ArgumentParser,
) -> None:
    """Add `ls` to the argparse subparsers `subparsers`.

    Args:
        directory: parser of the argument DIR.
    """
    parser = subparsers.add_parser("ls", parents=[directory], help="list the checkpoints in DIR")
    parser.add_argument("--json", action="store_true", help=json_help(Listing))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Console) -> int:
    """List the checkpoints.

    Raises:
        NotCommittedError: the directory holds no checkpoint of any format.
    """
    store = listing.save_directory(args.directory)
    with busy("reading the checkpoints"):
        found = listing.checkpoints(store)
        entry = store.stat(TRACKER)
        is_file = entry is None or entry.kind == "file"
        tracker = tracker_text(store) if is_file else ""
        tracked = iteration_in(tracker or "")
        tracked_name = tracker if tracked is None else iteration_dir(tracked)
        if not found:
            raise NotCommittedError(_nothing(args.directory, store, tracker))
        kept_by = report.kept_by(found, tracked)
    entries = [
        Entry(
            directory=entry.directory,
            iteration=entry.iteration,
            state=entry.state,
            save_id=None if entry.commit is None else entry.commit.save_id,
            committed_at=None if entry.commit is None else entry.commit.committed_at,
            ranks=entry.ranks,
            nbytes=entry.nbytes,
            layout=entry.layout,
            tracked=entry.directory == tracked_name,
            kept_by=_rules(entry, kept_by),
            remark=entry.remark,
        )
        for entry in found
    ]
    if args.json:
        result = Listing(
            directory=args.directory,
            tracker=tracker,
            checkpoints=entries,
            writer=_writer(store),
        )
        say(out, json.dumps(msgspec.to_builtins(result), indent=2))
        return 0
    remarks = [entry.remark for entry in entries]
    print_table(out, _tables(entries, with_rules=kept_by is not None), remarks)
    if tracker is None:
        say(out, f"{TRACKER} is missing: a job would start from scratch")
    elif any(entry.tracked for entry in entries):
        say(out, f"* named by {TRACKER}")
    elif tracker:
        say(out, f"{TRACKER} names {tracker!r}, which is missing")
    else:
        say(out, f"{TRACKER} names no checkpoint")
    if (writer := alive.newest(store)) is not None:
        say(out, f"saved to by {writer.writer}, {writer.doing}")
    for line in _logs(args.directory, writer):
        say(out, line)
    return 0


def _logs(directory: str, writer: alive.Alive | None) -> Iterator[str]:
    """Yield a line for each log of an agent: this node's own, and those beside the checkpoints."""
    runtime_dir = load_config().runtime_dir
    own = place_of(absolute(directory), runtime_dir).log
    if own.exists():
        yield f"log of this node's agent: {platform.node()}:{own}"
    elif writer is not None and writer.host != platform.node():
        yield f"the log of an agent is on its node: 'flashckpt ls' there names it ({writer.host})"
    for path in sorted(Path(directory).glob(log.path_in("", "*").name)):
        yield f"log beside the checkpoints: {path}"


def _nothing(directory: str, store: Store, tracker: str | None) -> str:
    """Return the message on a directory without checkpoints."""
    fact = "" if not tracker else f", although {TRACKER} names {tracker!r}"
    if (writer := alive.newest(store)) is not None:
        return (
            f"{directory}: holds no checkpoint yet{fact}; {writer.writer} saves there, "
            f"{writer.doing}: wait until a save is committed"
        )
    return f"{directory}: holds no checkpoint{fact}; give Megatron's --save directory"


def _rules(entry: listing.IterationEntry, kept_by: dict[int, list[str]] | None) -> list[str] | None:
    if kept_by is None or entry.iteration is None:
        return None
    return kept_by.get(entry.iteration)


def _writer(store: Store) -> Writer | None:
    writer = alive.newest(store)
    if writer is None:
        return None
    return Writer(
        run=writer.run,
        host=writer.host,
        agent_pid=writer.pid,
        renewed_at=writer.renewed_at,
        state=writer.state,
    )


def _tables(entries: list[Entry], *, with_rules: bool) -> Iterator[Columns]:
    """Yield tables of checkpoints: one with all columns, then those for narrow terminals."""
    rules = [
        "" if entry.kept_by is None else ", ".join(entry.kept_by) or "nothing" for entry in entries
    ]
    columns = {
        "": ["*" if entry.tracked else "" for entry in entries],
        "iteration": [
            entry.directory if entry.iteration is None else str(entry.iteration)
            for entry in entries
        ],
        "state": [entry.state for entry in entries],
        "date": [clock(entry.committed_at, "%Y-%m-%d %H:%M") for entry in entries],
        "ranks": ["" if entry.ranks is None else str(entry.ranks) for entry in entries],
        "size": ["" if entry.nbytes is None else human_size(entry.nbytes) for entry in entries],
        "layout": [entry.layout for entry in entries],
        **({"kept by": rules} if with_rules else {}),
        "remark": [entry.remark for entry in entries],
    }
    yield columns
    del columns["remark"]
    yield columns
    columns["date"] = [clock(entry.committed_at, "%m-%d %H:%M") for entry in entries]
    yield columns
    for name in ("layout", "ranks"):
        del columns[name]
        yield columns
