"""`flashckpt ls`: the checkpoints of a save directory, whatever their format and state."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from megatron_flashckpt.agent import claim, log
from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.tracker import iteration_in, tracker_text
from megatron_flashckpt.cli import report
from megatron_flashckpt.cli.console import (
    Columns,
    busy,
    clock,
    complain,
    human_size,
    json_help,
    print_table,
    say,
)
from megatron_flashckpt.config import load_config
from megatron_flashckpt.errors import CorruptCheckpointError, NotCommittedError
from megatron_flashckpt.file_format.file_names import TRACKER, iteration_dir
from megatron_flashckpt.storage.base import Storage

#: Names of a writer's states in JSON, in the order of `claim.TRAINING` and the following ones.
_STATES = ("training", "finishing", "idle", "ended")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Iteration directory, as `ls --json` prints it."""

    directory: str
    iteration: int | None
    """None for Megatron's `release`."""
    state: str
    committed_at: float | None
    """Seconds since 1970; None if the directory has no manifest that can be read."""
    ranks: int | None
    nbytes: int | None
    layout: str
    tracked: bool
    """True if the tracker names this directory."""
    kept_by: list[str] | None
    """Rules of 'retention' that keep the checkpoint; None without rules."""
    remark: str


class Claimant(msgspec.Struct, frozen=True, kw_only=True):
    """Run that has claimed the save directory, as `ls --json` prints it."""

    run_id: str
    host: str
    agent_pid: int
    renewed_at: float
    """Seconds since 1970 on the writer's host."""
    state: str


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Save directory, as `ls --json` prints it."""

    directory: str
    tracker: str | None
    """Contents of the tracker; None if the file is missing."""
    checkpoints: list[Entry]
    claim: Claimant | None


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
    storage = listing.save_directory(args.directory)
    with busy("reading the checkpoints"):
        found = listing.checkpoints(storage)
        tracker = tracker_text(storage)
        tracked = iteration_in(tracker or "")
        tracked_name = tracker if tracked is None else iteration_dir(tracked)
        if not found:
            raise NotCommittedError(_nothing(args.directory, storage, tracker))
        kept_by = report.kept_by(storage, tracked)
    entries = [
        Entry(
            directory=entry.directory,
            iteration=entry.iteration,
            state=entry.state,
            committed_at=entry.committed_at,
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
            claim=_claimant(storage),
        )
        say(out, json.dumps(msgspec.to_builtins(result), indent=2))
        return 0
    remarks = [entry.remark for entry in entries]
    print_table(out, _tables(entries, with_rules=kept_by is not None), remarks)
    if tracker is None:
        say(out, f"{TRACKER} is missing: a job would start from scratch")
    elif any(entry.tracked for entry in entries):
        say(out, f"* named by {TRACKER}")
    else:
        say(out, f"{TRACKER} names {tracker!r}, which is missing")
    if (writer := _claim(storage)) is not None:
        say(out, f"claimed by {writer.writer}{claim.DOING[writer.state]}")
    for line in _logs(args.directory, writer):
        say(out, line)
    return 0


def _logs(directory: str, writer: claim.Claim | None) -> Iterator[str]:
    """Yield a line for each log of an agent: this node's own, and those beside the checkpoints."""
    runtime_dir = load_config().runtime_dir
    own = place_of(os.path.abspath(directory), runtime_dir).log
    if own.exists():
        yield f"log of this node's agent: {platform.node()}:{own}"
    elif writer is not None and writer.host != platform.node():
        yield f"the log of an agent is on its node: 'flashckpt ls' there names it ({writer.host})"
    for path in sorted(Path(directory).glob(log.path_in("", "*").name)):
        yield f"log beside the checkpoints: {path}"


def _nothing(directory: str, storage: Storage, tracker: str | None) -> str:
    """Return the message on a directory without checkpoints."""
    fact = "" if tracker is None else f", although {TRACKER} names {tracker!r}"
    if (writer := _claim(storage)) is not None and writer.state != claim.ENDED:
        return (
            f"{directory}: holds no checkpoint yet{fact}; it is claimed by {writer.writer}"
            f"{claim.DOING[writer.state]}: wait until a save is committed"
        )
    return f"{directory}: holds no checkpoint{fact}; give Megatron's --save directory"


def _rules(entry: listing.IterationEntry, kept_by: dict[int, list[str]] | None) -> list[str] | None:
    if kept_by is None or entry.iteration is None:
        return None
    return kept_by.get(entry.iteration)


def _claim(storage: Storage) -> claim.Claim | None:
    """Return the claim to the directory; None without one, and after a line on a damaged one."""
    try:
        return claim.read(storage)
    except CorruptCheckpointError as error:
        complain(str(error), 0)
        return None


def _claimant(storage: Storage) -> Claimant | None:
    writer = _claim(storage)
    if writer is None:
        return None
    return Claimant(
        run_id=writer.run_id,
        host=writer.host,
        agent_pid=writer.pid,
        renewed_at=writer.renewed_at,
        state=_STATES[writer.state],
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
