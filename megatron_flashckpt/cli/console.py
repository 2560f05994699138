"""Output of the command line, for terminals and for `cut` and `awk` in a pipe."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterator
from typing import Any

from msgspec import inspect
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from megatron_flashckpt.errors import for_command


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


def complain(message: str, status: int) -> int:
    """Print `message` as one line to stderr; return `status`."""
    one_line = " ".join(line.strip() for line in for_command(message).splitlines())
    err = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    err.print(f"flashckpt: {printable(one_line, err.encoding)}")
    return status


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


class _Speed(ProgressColumn):
    """Column of the transfer speed, in the binary units of the sizes next to it."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{human_size(int(speed))}/s")


def progress_bar() -> Progress:
    """Return a progress bar in bytes; a terminal shows it until it is done, a pipe never."""
    err = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), _Speed())
    return Progress(
        *columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal
    )


def new_table(*columns: str) -> Table:
    """Return an empty table without borders, so that `cut` and `awk` can split its rows."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column in ("ranks", "size", "pieces", "iteration", "rank")
        table.add_column(
            column,
            justify="right" if right else "left",
            no_wrap=column in ("date", "state"),
            overflow="fold",
        )
    return table


def add_row(table: Table, out: Console, *cells: str) -> None:
    table.add_row(*(Text(printable(cell, out.encoding)) for cell in cells))


def say(out: Console, text: str) -> None:
    for line in text.split("\n"):
        out.print(printable(line, out.encoding))


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
    """Return a time (seconds since 1970) in local time; empty for None.

    Args:
        form: format of `strftime`.
    """
    if seconds is None:
        return ""
    return datetime.datetime.fromtimestamp(seconds).strftime(form)


def printable(text: str, encoding: str) -> str:
    """Return `text` with control characters escaped: a hostile file must not steer the terminal."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)
