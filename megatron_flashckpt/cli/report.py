"""`flashckpt report`: a job's saves and starts, and the rules that keep checkpoints.

Manifests hold the timings of committed saves; the history adds saves that failed or were
removed since, and the starts of the job. The command needs neither torch nor a running job.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console

from megatron_flashckpt.catalog import history, listing
from megatron_flashckpt.catalog.measured_job import MeasuredJob, measured
from megatron_flashckpt.catalog.retention import why_kept
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.cli.console import (
    Columns,
    busy,
    clock,
    counted,
    human_size,
    human_time,
    json_help,
    print_table,
    printable,
    say,
)
from megatron_flashckpt.config import Retention, load_config
from megatron_flashckpt.errors import FlashCkptError, NotCommittedError, for_listing
from megatron_flashckpt.layout.save_cost import SaveCost
from megatron_flashckpt.sizing.cluster_model import Cluster, lost_s_per_day, strategy
from megatron_flashckpt.storage.opening import absolute

REMOVED, REPLACED, FAILED, STARTED = "removed", "replaced", "failed", "started"
_PNG = b"\x89PNG\r\n\x1a\n"
#: Most saves that a drawing shows: more bars would be thinner than a pixel.
_MAX_BARS = 200
#: Labels and colors of a drawing's phases. Failures are red, so no phase is.
_PHASES = {
    "blocked_s": ("training blocked", "tab:orange"),
    "staged_s": ("until staged", "tab:blue"),
    "persisted_s": ("until persisted", "tab:cyan"),
    "durable_s": ("until durable", "tab:green"),
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Save to storage, with its state and timings, or a start of the job."""

    iteration: int
    """Iteration that a start has resumed from; 0: from scratch."""
    save_id: str | None
    """None if the manifest cannot be read and the history lacks the save; of a start: the save that
    the job resumed from."""
    state: str
    """`started`, `failed`, `removed`, `replaced`, or the state of its directory that `flashckpt ls`
    shows."""
    ended_at: float | None
    """Seconds since 1970; of a start: its time."""
    cost: SaveCost | None = None
    """Timings; None if the save failed, or its trainers ended before they reported."""
    gb_per_s: float | None = None
    """Bytes of all ranks over the time from the call to the commit."""
    kept_by: tuple[str, ...] = ()
    """Rules of 'retention' that keep the checkpoint."""
    error: str | None = None
    """Reason of a failed save."""
    remark: str = ""
    """Problem of a checkpoint whose save did not fail."""


def rows(
    entries: list[listing.IterationEntry],
    past: list[history.PastSave | history.PastStart],
    reasons: dict[int, list[str]],
) -> list[Row]:
    """Return all saves in storage and in the history, and the starts, in order of time.

    Args:
        entries: the iteration directories.
        past: the history.
        reasons: rules that keep a checkpoint, by iteration.
    """
    stored = {entry.commit.save_id for entry in entries if entry.commit is not None}
    by_iteration = {entry.iteration: entry for entry in entries}
    result = []
    for entry in entries:
        if (commit := entry.commit) is None:
            continue
        result.append(
            Row(
                iteration=commit.iteration,
                save_id=commit.save_id,
                state=entry.state,
                ended_at=commit.committed_at,
                cost=commit.cost,
                gb_per_s=_speed(commit.cost),
                kept_by=tuple(reasons.get(commit.iteration, ())),
                remark=entry.remark,
            )
        )
    # Of two lines with one save id the later wins: an agent that replaced another one wrote it.
    former_saves = {
        save.save_id: save
        for save in past
        if isinstance(save, history.PastSave) and save.save_id not in stored
    }
    for save in former_saves.values():
        if save.error is not None:
            state, remark = FAILED, ""
        else:
            state, remark = _state_and_remark(by_iteration.get(save.iteration))
        result.append(
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
    result += [_start(start) for start in past if isinstance(start, history.PastStart)]
    listed = {row.iteration for row in result if row.state not in (REMOVED, REPLACED, STARTED)}
    result += [
        Row(
            iteration=entry.iteration,
            save_id=None,
            state=entry.state,
            ended_at=None,
            remark=entry.remark,
        )
        for entry in entries
        if entry.state == listing.UNREADABLE
        and entry.iteration is not None
        and entry.iteration not in listed
    ]
    return sorted(result, key=lambda row: (row.ended_at or 0.0, row.iteration))


def _start(start: history.PastStart) -> Row:
    origin = {"memory": "resumed from memory", "storage": "resumed from storage"}
    return Row(
        iteration=start.iteration,
        save_id=start.save_id,
        state=STARTED,
        ended_at=start.started_at,
        remark=f"run {start.run}, {counted(start.world_size, 'rank')}, "
        f"{origin.get(start.source, 'from scratch')}",
    )


def _state_and_remark(entry: listing.IterationEntry | None) -> tuple[str, str]:
    """Return state and remark of a committed save that does not count in its directory.

    Args:
        entry: the directory of the iteration, if it still exists.
    """
    if entry is None:
        return REMOVED, ""
    if entry.commit is not None:
        return REPLACED, f"{entry.commit.save_id} has saved this iteration again"
    if entry.state == listing.MEGATRON:
        return REPLACED, f"{entry.directory} is in Megatron's own format '{entry.remark}'"
    if entry.state == listing.UNREADABLE:
        return entry.state, entry.remark
    return REMOVED, ""


def _speed(cost: SaveCost | None) -> float | None:
    return cost.nbytes / 1e9 / cost.durable_s if cost is not None and cost.durable_s > 0 else None


def kept_by(
    entries: list[listing.IterationEntry], tracked: int | None
) -> dict[int, list[str]] | None:
    """Return by iteration the configured rules that keep it; None without rules."""
    rules = load_config().retention
    if rules == Retention() or tracked is None:
        return None
    commits = [
        entry.commit
        for entry in entries
        if entry.commit is not None and entry.state == listing.COMMITTED
    ]
    return why_kept(commits, rules, retain_interval=None, tracked=tracked, previous=None)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the argparse subparsers `subparsers`."""
    parser = subparsers.add_parser(
        "report", help="show timings and failures of a job's saves, and its starts"
    )
    parser.add_argument("directory", metavar="DIR", help="save directory (Megatron's --save)")
    parser.add_argument("--json", action="store_true", help=json_help(list[Row]))
    parser.add_argument("--png", metavar="FILE", help="draw a timeline (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Console) -> int:
    """Print the report, and draw it if `--png` is given.

    Raises:
        NotCommittedError: the directory has no record of a save.
    """
    with busy("reading the checkpoints"):
        store = listing.save_directory(args.directory)
        entries = [entry for entry in listing.checkpoints(store) if entry.iteration is not None]
        reasons = kept_by(entries, tracked_iteration(store))
        past = history.events(store)
        report_rows = rows(entries, past, reasons or {})
    if not report_rows:
        raise NotCommittedError(
            f"{args.directory}: holds no checkpoint in flashckpt format and no history of saves; "
            "give Megatron's --save directory"
        )
    if args.png:  # before the output, which is empty after an error
        draw([row for row in report_rows if row.state != STARTED], args.png, args.directory)
    if args.json:
        say(out, json.dumps(msgspec.to_builtins(report_rows), indent=2))
        return 0
    _print(report_rows, out, with_rules=reasons is not None)
    _print_interval(measured(past), out)
    if args.png:
        say(out, f"drawn: {args.png}")
    return 0


_TIMINGS = ("size", "blocked", "staged", "persisted", "durable", "GB/s", "slowest rank", "plans")
#: Columns that a terminal lacks if its lines are too short, in the order in which they go.
_DETAILS = ("plans", "slowest rank", "persisted", "GB/s", "size", "staged", "ended")


def _print(report_rows: list[Row], out: Console, *, with_rules: bool) -> None:
    remarks = [row.error or row.remark for row in report_rows]
    print_table(out, _tables(report_rows, remarks, with_rules=with_rules), remarks)
    failed = f"{sum(row.state == FAILED for row in report_rows)} failed"
    problems = sum(row.state in (listing.DAMAGED, listing.UNREADABLE) for row in report_rows)
    damaged = f", {problems} damaged or unreadable" if problems else ""
    costs = sorted(row.cost.blocked_s for row in report_rows if row.cost is not None)
    median = f", median blocked {human_time(costs[len(costs) // 2])}" if costs else ""
    saves = counted(sum(row.state != STARTED for row in report_rows), "save")
    say(out, f"{saves}, {failed}{damaged}{median}")


def _print_interval(job: MeasuredJob | None, out: Console) -> None:
    """Print the save interval that loses least, and what it assumes."""
    if job is None:
        say(out, "no save interval is proposed: no run has two committed saves in the history")
        return
    assumed_s = 3600 * Cluster().gpu_mtbf_h / job.world_size
    cluster = Cluster(iteration_s=job.iteration_s, restart_s=0.0)
    mtbf_s = job.mtbf_s or assumed_s
    best = strategy(job.blocked_s, job.durable_s, job.nbytes, mtbf_s, cluster)
    present_s = job.interval_iterations * job.iteration_s
    present = lost_s_per_day(present_s, job.blocked_s, job.durable_s, mtbf_s, 0.0)
    seen = (
        f"{counted(job.interruptions, 'interruption')} in {human_time(job.trained_s)} of training"
    )
    if job.mtbf_s is None:
        seen += (
            f", too few to tell; assumed is one in {human_time(assumed_s)}, as for other jobs of "
            f"{counted(job.world_size, 'rank')}"
        )
    else:
        seen += f", one in {human_time(mtbf_s)}; every resumed start counts as one"
    say(
        out,
        f"an iteration takes {human_time(job.iteration_s)}, a save blocks "
        f"{human_time(job.blocked_s)} and is durable after {human_time(job.durable_s)} (medians); "
        f"{seen}",
    )
    say(
        out,
        f"--save-interval {best.interval_iterations} (every {human_time(best.interval_s)}) loses "
        f"least: {human_time(best.lost_s_per_day)} per day for saves and repeated work, without "
        f"restarts; the present {job.interval_iterations} (every {human_time(present_s)}) loses "
        f"{human_time(present)}",
    )


def _tables(report_rows: list[Row], remarks: list[str], *, with_rules: bool) -> Iterator[Columns]:
    """Yield tables of saves: one with all columns, then those for narrow terminals."""
    details = [_details(row) for row in report_rows]
    columns = {
        "iteration": [str(row.iteration) for row in report_rows],
        "state": [row.state for row in report_rows],
        "ended": [clock(row.ended_at, "%Y-%m-%d %H:%M:%S") for row in report_rows],
        **{name: [cells.get(name, "") for cells in details] for name in _TIMINGS},
        **({"kept by": [_rules(row) for row in report_rows]} if with_rules else {}),
        "remark": remarks,
    }
    yield columns
    del columns["remark"]
    yield columns
    columns["ended"] = [clock(row.ended_at, "%m-%d %H:%M") for row in report_rows]
    yield columns
    for name in _DETAILS:
        del columns[name]
        yield columns


def _rules(row: Row) -> str:
    nothing = "nothing" if row.state == listing.COMMITTED else ""
    return ", ".join(row.kept_by) or nothing


def _details(row: Row) -> dict[str, str]:
    """Return the cells of `_TIMINGS`; none without timings."""
    if (cost := row.cost) is None:
        return {}
    times = (cost.blocked_s, cost.staged_s, cost.persisted_s, cost.durable_s)
    speed = "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}"
    texts = [human_size(cost.nbytes), *map(human_time, times), speed, str(cost.slowest)]
    return dict(zip(_TIMINGS, [*texts, _plans(cost)], strict=True))


def _plans(cost: SaveCost) -> str:
    counts = {} if cost.plans is None else msgspec.structs.asdict(cost.plans)
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def draw(report_rows: list[Row], file: str | os.PathLike[str], directory: str) -> None:
    """Draw the last saves as a timeline: a bar of phases per save, a cross per failure.

    Args:
        directory: save directory, for the title.

    Raises:
        FlashCkptError: matplotlib is missing, the file cannot be written, or it is not a PNG.
    """
    _refuse_other_file(file)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlashCkptError(
            f"--png needs matplotlib, which cannot be imported ({error}); pip install matplotlib"
        ) from error
    last_rows = report_rows[-_MAX_BARS:]
    figure: Any = Figure(figsize=(10, 2 + 0.25 * len(last_rows)), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display, whatever backend matplotlib is configured for
    axes = figure.add_subplot()
    starts = [0.0] * len(last_rows)
    for name, (label, color) in _PHASES.items():
        ends = [getattr(row.cost, name) if row.cost is not None else 0.0 for row in last_rows]
        widths = [max(0.0, end - begin) for begin, end in zip(starts, ends, strict=True)]
        axes.barh(range(len(last_rows)), widths, left=starts, label=label, color=color)
        starts = [begin + width for begin, width in zip(starts, widths, strict=True)]
    failed = [n for n, row in enumerate(last_rows) if row.state == FAILED]
    if failed:
        axes.plot([0.0] * len(failed), failed, "rx", label="failed", clip_on=False)
    axes.set_yticks(range(len(last_rows)), [_tick(row) for row in last_rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since training called for the save")
    axes.set_ylabel("iteration")
    number = f"the last {_MAX_BARS} saves" if len(report_rows) > _MAX_BARS else "saves"
    place = printable(absolute(directory), "ascii")  # fonts lack other characters
    axes.set_title(f"{number} to {place}", parse_math=False, wrap=True)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars, not over them
    try:
        figure.savefig(file, format="png", dpi=100)
    except OSError as error:
        raise FlashCkptError(
            f"{file}: cannot be written ({error.strerror or error}); free space there, or name a "
            "file in another directory with --png"
        ) from error


def _tick(row: Row) -> str:
    return str(row.iteration) + (f" ({row.state})" if row.state != listing.COMMITTED else "")


def _refuse_other_file(file: str | os.PathLike[str]) -> None:
    """Raise if a drawing would replace a file that is not a PNG, such as a checkpoint's."""
    try:
        with open(file, "rb") as stream:
            signature = stream.read(len(_PNG))
    except OSError:
        return  # missing, or unreadable: `savefig` reports the latter
    if signature not in (b"", _PNG):
        raise FlashCkptError(
            f"{file}: exists and is not a PNG, so it was not replaced; name another file"
        )
