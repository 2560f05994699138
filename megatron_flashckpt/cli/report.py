"""`flashckpt report`: what the saves of a job took, which failed, and why those that are left stay.

Checkpoints say of themselves what they took; the history beside them knows those that failed or
were removed since. Needs neither torch nor the job.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from typing import Any

import msgspec
from rich.console import Console

from megatron_flashckpt.catalog import history, listing
from megatron_flashckpt.catalog.retention import committed, survey, why_kept
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.cli.console import add_row, human_size, human_time, new_table, say
from megatron_flashckpt.config import Retention, load_config
from megatron_flashckpt.errors import FlashCkptError, for_listing
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.layout.save_cost import SaveCost
from megatron_flashckpt.storage.base import Storage

REMOVED, REPLACED, FAILED = "removed", "replaced", "failed"
_PNG = b"\x89PNG\r\n\x1a\n"
#: What a drawing shows at most: more bars are thinner than a pixel.
_DRAWN = 200


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One save to storage."""

    iteration: int
    save_id: str | None
    """None: the manifest cannot be read, and the history does not tell."""
    state: str
    """`failed`, `removed`, `replaced`, or the state of its directory that `flashckpt ls` shows."""
    ended_at: float | None
    """Seconds since 1970."""
    cost: SaveCost | None = None
    """None: it failed, or its trainers did not live to say."""
    gb_per_s: float | None = None
    """All bytes, from the call to the commit."""
    kept_by: tuple[str, ...] = ()
    """The rules of 'retention' that keep it."""
    error: str | None = None
    """Why it failed."""
    remark: str = ""
    """What is wrong with a checkpoint that did not fail."""


def rows(storage: Storage, reasons: dict[int, list[str]]) -> list[Row]:
    """Return the saves that are known of, in the order in which they ended.

    Args:
        reasons: by iteration, why a checkpoint stays.
    """
    commits, unreadable = survey(storage, storage.list(""))
    stored = {commit.save_id: commit for commit in commits}
    # A later line about a save is by an agent that took over from the one that wrote the earlier.
    past = {save.save_id: save for save in history.read(storage) if save.save_id not in stored}
    here = {one.iteration: one for one in listing.checkpoints(storage)}
    found = []
    for commit in stored.values():
        one = here.get(commit.iteration)
        found.append(
            Row(
                iteration=commit.iteration,
                save_id=commit.save_id,
                state=listing.COMMITTED if one is None else one.state,
                ended_at=commit.committed_at,
                cost=commit.cost,
                gb_per_s=_speed(commit.cost),
                kept_by=tuple(reasons.get(commit.iteration, ())),
                remark="" if one is None else one.remark,
            )
        )
    for save in past.values():
        if save.error is not None:
            state, remark = FAILED, ""
        else:
            state, remark = _what_became_of(save, here.get(save.iteration), storage)
        found.append(
            Row(
                iteration=save.iteration,
                save_id=save.save_id,
                state=state,
                ended_at=save.ended_at,
                cost=save.cost,
                gb_per_s=_speed(save.cost),
                error=None if save.error is None else for_listing(save.error),
                remark=remark,
            )
        )
    told = {row.iteration for row in found if row.state not in (REMOVED, REPLACED)}
    found += [
        Row(
            iteration=iteration,
            save_id=None,
            state=listing.UNREADABLE,
            ended_at=None,
            remark=for_listing(str(error)),
        )
        for iteration, error in unreadable.items()
        if iteration not in told
    ]
    return sorted(found, key=lambda row: (row.ended_at or 0.0, row.iteration))


def _what_became_of(
    save: history.PastSave, one: listing.Found | None, storage: Storage
) -> tuple[str, str]:
    """Return state and remark of a save that was committed and of which no manifest tells.

    Args:
        one: the directory of its iteration, if that is still there.
    """
    if one is None:
        return REMOVED, ""
    if one.state in (listing.COMMITTED, listing.DAMAGED):
        return REPLACED, "the iteration was saved again"
    if one.state == listing.MEGATRON:
        return REPLACED, f"{one.directory} is in Megatron's own format '{one.remark}'"
    try:
        left = storage.list(one.directory)
    except FlashCkptError:
        return one.state, one.remark
    if save.save_id in map(file_names.save_id_of, left):
        return one.state, one.remark
    return REMOVED, ""


def _speed(cost: SaveCost | None) -> float | None:
    return cost.nbytes / 1e9 / cost.durable_s if cost is not None and cost.durable_s > 0 else None


def kept_by(storage: Storage, tracked: int | None) -> dict[int, list[str]] | None:
    """Return by iteration which of the configured rules keep it; None without rules."""
    rules = load_config().retention
    if rules == Retention() or tracked is None:
        return None
    commits: list[CommitFacts] = committed(storage, storage.list(""))
    return why_kept(
        commits, rules, retain_interval=None, tracked=tracked, previous=None, now=time.time()
    )


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser("report", help="show what the saves of a job took, and failures")
    parser.add_argument("directory", metavar="DIR", help="save directory (Megatron's --save)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--png", metavar="FILE", help="draw a timeline (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Console) -> int:
    """Print the report, and draw it if asked for."""
    storage = listing.save_directory(args.directory)
    reasons = kept_by(storage, tracked_iteration(storage))
    found = rows(storage, reasons or {})
    if args.json:
        say(out, json.dumps(msgspec.to_builtins(found), indent=2))
    elif not found:
        say(out, f"{args.directory}: nothing is known of any save")
    else:
        _print(found, out, with_rules=reasons is not None)
    if args.png:
        draw(found, args.png)
        if not args.json:
            say(out, f"drawn: {args.png}")
    return 0


def _print(found: list[Row], out: Console, *, with_rules: bool) -> None:
    columns = ["iteration", "state", "ended", "size", "blocked", "staged", "persisted", "durable"]
    columns += ["GB/s", "slowest rank", "plans", *(["kept by"] if with_rules else []), "remark"]
    table = new_table(*columns)
    for row in found:
        cells = [str(row.iteration), row.state, _clock(row.ended_at), *_cells(row)]
        if with_rules:
            nothing = "nothing" if row.state == listing.COMMITTED else ""
            cells.append(", ".join(row.kept_by) or nothing)
        add_row(table, out, *cells, row.error or row.remark)
    out.print(table)
    failed = f"{sum(row.state == FAILED for row in found)} failed"
    wrong = sum(row.state in (listing.DAMAGED, listing.UNREADABLE) for row in found)
    damaged = f", {wrong} damaged or unreadable" if wrong else ""
    costs = sorted(row.cost.blocked_s for row in found if row.cost is not None)
    median = f", median blocked {human_time(costs[len(costs) // 2])}" if costs else ""
    say(out, f"{len(found)} saves, {failed}{damaged}{median}")


def _cells(row: Row) -> list[str]:
    if (cost := row.cost) is None:
        return [""] * 8
    times = (cost.blocked_s, cost.staged_s, cost.persisted_s, cost.durable_s)
    speed = "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}"
    slowest = str(cost.slowest)
    return [human_size(cost.nbytes), *map(human_time, times), speed, slowest, _plans(cost)]


def _plans(cost: SaveCost) -> str:
    counts = {} if cost.plans is None else msgspec.structs.asdict(cost.plans)
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def draw(found: list[Row], file: str | os.PathLike[str]) -> None:
    """Draw the last saves as a timeline: a bar per save, cut into phases, and a cross per failure.

    Raises:
        FlashCkptError: matplotlib is not there, the file cannot be written, or is another's.
    """
    _refuse_other_file(file)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlashCkptError(
            f"--png needs matplotlib, which cannot be imported ({error}): pip install matplotlib"
        ) from error
    shown = found[-_DRAWN:]
    figure: Any = Figure(figsize=(10, 2 + 0.25 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)  # no window and no display, whatever matplotlib is set up for
    axes = figure.add_subplot()
    drawn = [0.0] * len(shown)
    for name in ("blocked_s", "staged_s", "persisted_s", "durable_s"):
        ends = [getattr(row.cost, name) if row.cost is not None else 0.0 for row in shown]
        widths = [max(0.0, end - begin) for begin, end in zip(drawn, ends, strict=True)]
        axes.barh(range(len(shown)), widths, left=drawn, label=f"until {name.removesuffix('_s')}")
        drawn = [begin + width for begin, width in zip(drawn, widths, strict=True)]
    failed = [n for n, row in enumerate(shown) if row.state == FAILED]
    axes.plot([0.0] * len(failed), failed, "rx", label="failed")
    axes.set_yticks(range(len(shown)), [f"{row.iteration} ({row.state})" for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since training called for the save")
    axes.set_ylabel("iteration")
    axes.legend(loc="best")
    try:
        figure.savefig(file, format="png", dpi=100)
    except OSError as error:
        raise FlashCkptError(f"{file}: cannot be written ({error.strerror or error})") from error


def _refuse_other_file(file: str | os.PathLike[str]) -> None:
    """Raise if a drawing would replace something else, such as a file of a checkpoint."""
    try:
        with open(file, "rb") as held:
            begin = held.read(len(_PNG))
    except OSError:
        return  # it is not there, or cannot be written either
    if begin not in (b"", _PNG):
        raise FlashCkptError(
            f"{file}: exists and is no PNG; nothing was changed; name another file"
        )
