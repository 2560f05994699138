"""Output of the command line, for terminals and for `cut` and `awk` in a pipe."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import inspect
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megatron_flashckpt.errors import ConfigError, for_command
from megatron_flashckpt.storage.opening import refuse_unusable, refuse_url

#: Width of a pipe: whatever the width of a table, its rows are lines.
PIPE_COLUMNS = 10**6
Columns = Mapping[str, Sequence[str]]
"""Cells of a table by the titles of its columns."""

_RIGHT = ("ranks", "size", "pieces", "iteration", "rank")
#: Seconds of silent work after which a terminal shows that the command is busy.
_SILENT_S = 1.0


def json_help(kind: Any) -> str:
    """Return the help text of `--json`, which names the fields of the output.

    Args:
        kind: type of the output.
    """
    return f"print JSON: {_fields(inspect.type_info(kind))}"


def _fields(kind: inspect.Type) -> str:
    """Return the fields of a JSON value, as `{a, b: [{c}]}`; empty for a value without fields."""
    match kind:
        case inspect.StructType():
            shapes = {field.encode_name: _fields(field.type) for field in kind.fields}
            named = (f"{name}: {shape}" if shape else name for name, shape in shapes.items())
            return "{" + ", ".join(named) + "}"
        case inspect.ListType() | inspect.VarTupleType():
            shape = _fields(kind.item_type)
            return f"[{shape}]" if shape else ""
        case inspect.UnionType():
            return "".join(map(_fields, kind.types))
    return ""


def save_argument(text: str) -> str:
    """Return the argument `text`, which names a save directory or its URL; for argparse."""
    return _checked(text, refuse_unusable)


def directory_argument(text: str) -> str:
    """Return the argument `text`, which names a directory to write; for argparse."""
    return _checked(text, refuse_url)


def _checked(text: str, refuse: Callable[[str], None]) -> str:
    if not text.strip():  # an unset shell variable; as a path, the working directory
        raise argparse.ArgumentTypeError(f"{text!r} names no directory")
    try:
        refuse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def complain(message: str, status: int) -> int:
    """Print `message` as one line to stderr; return `status`."""
    one_line = " ".join(line.strip() for line in for_command(message).splitlines())
    err = _stderr()
    err.print(f"flashckpt: {printable(one_line, err.encoding)}", soft_wrap=True)
    return status


@functools.cache
def _stderr() -> Console:
    """Return the console of stderr; only one can print a line while it shows a progress bar."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


class _Complaints(logging.Handler):
    """Log handler that prints each warning once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._printed:
            self._printed.add(message)
            complain(message, 0)


@contextlib.contextmanager
def log_as_complaints() -> Iterator[None]:
    """Print the package's log records of level WARNING and above to stderr, inside the context."""
    logger, handler = logging.getLogger("megatron_flashckpt"), _Complaints()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Amount(DownloadColumn):
    """Column of the bytes so far and in total; empty until the total is known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _Speed(ProgressColumn):
    """Column of the transfer speed, in the binary units of the sizes next to it."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{human_size(int(speed))}/s")


def progress_bar() -> Progress:
    """Return a progress bar in bytes; a terminal shows it until it is done, a pipe never."""
    err = _stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), _Amount(True), _Speed())
    return Progress(
        *columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal
    )


@contextlib.contextmanager
def busy(description: str) -> Iterator[None]:
    """Show `description` on a terminal while the context is not left within a second."""
    err = _stderr()
    if not err.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=err, transient=True)
    progress.add_task(description, total=None)
    timer = threading.Timer(_SILENT_S, progress.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if progress.live.is_started:
            progress.stop()


def is_pipe(out: Console) -> bool:
    """Return whether programs read the output, which need a line with all cells for each row."""
    return out.width >= PIPE_COLUMNS


def table_lines(columns: Columns, out: Console) -> list[str]:
    """Return the titles and the rows of a table, each as one line; no cell is folded.

    The table has no borders, so that `cut` and `awk` can split its rows.
    """
    padded = []
    for title, cells in columns.items():
        texts = [printable(text, out.encoding) for text in (title, *cells)]
        width = max(map(cell_len, texts))
        spaces = [" " * (width - cell_len(text)) for text in texts]
        pairs = zip(spaces, texts, strict=True)
        padded.append([s + t if title in _RIGHT else t + s for s, t in pairs])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def print_table(
    out: Console, choices: Iterable[Columns], remarks: Sequence[str] | None = None
) -> None:
    """Print the first table of `choices` that fits into the lines of `out`, or else the last.

    Args:
        remarks: a text for each row, printed below the row if the chosen table has no column
            `remark`.
    """
    columns: Columns = {}
    lines: list[str] = []
    for columns in choices:
        lines = table_lines(columns, out)
        if is_pipe(out) or max(map(cell_len, lines)) <= out.width:
            break
    print_titles(out, lines[0])
    below = [] if remarks is None or "remark" in columns else remarks
    for line, remark in itertools.zip_longest(lines[1:], below, fillvalue=""):
        say(out, line)
        if remark:
            say(out, "  " + printable(remark, out.encoding))


def print_titles(out: Console, line: str) -> None:
    out.print(Text(line, style="bold"))


def print_facts(out: Console, facts: Mapping[str, str]) -> None:
    """Print names and their values, a line each, and an empty line."""
    columns = {"": list(facts), " ": list(facts.values())}
    for line in table_lines(columns, out)[1:]:
        say(out, line)
    out.print()


def say(out: Console, text: str) -> None:
    for line in text.split("\n"):
        out.print(printable(line, out.encoding))


def counted(number: int, noun: str) -> str:
    """Return `number` with `noun` in its singular or plural, such as `1 file` or `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def human_size(nbytes: int) -> str:
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


def human_time(seconds: float) -> str:
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * scale or (unit == "s" and seconds >= 1):
            return f"{seconds / scale:.1f} {unit}"
    return f"{1000 * seconds:.1f} ms"


def clock(seconds: float | None, form: str) -> str:
    """Return a time (seconds since 1970) in local time; empty for None, or a time of no calendar.

    Args:
        form: format of `strftime`.
    """
    try:
        return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime(form)
    except (OverflowError, ValueError, OSError):  # a damaged history, which has no digests
        return ""


def printable(text: str, encoding: str) -> str:
    """Return `text` with control characters escaped: a hostile file must not steer the terminal."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)
