"""Matrix of releases and features: the marks of each release, stored between calls, and the table.

`test_releases.py` tries the features. The pytest plugin `Matrix` chooses the releases and collects
their marks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from patches.patch import TAGS
from tools.compat.conversions import follows_dlrover, follows_torch, leaves_to_torch
from tools.compat.release import FEATURES as OF_RELEASE
from tools.compat.release import CellError, NotHereError, Release
from tools.compat.tree import REPO, Tree, end_nurseries

TICK, CROSS, NONE = "\u2713", "\u2717", "-"
PAGE = REPO / "docs/reference/releases.md"
#: Features in the order in which they run: a later one reads the checkpoints of earlier ones. The
#: text that a feature returns becomes a note below the table.
FEATURES: dict[str, Callable[[Release], str | None]] = {
    **OF_RELEASE,
    "converted from DLRover: resumes bit for bit": follows_dlrover,
    "converted from Megatron's `torch`: resumes bit for bit": follows_torch,
    "converted to Megatron's `torch`: stock resumes": leaves_to_torch,
}
#: The first features, without which no other can run: stock trains, and a checkpoint exists.
_REQUIRED = 2
#: Lines between which `--docs` writes the table.
BEGIN, FINISH = "<!-- scripts/compat --docs -->\n", "<!-- end of scripts/compat -->\n"


@dataclasses.dataclass(frozen=True)
class Column:
    """Results of one release."""

    tag: str
    revision: str
    """Commit of the tree, with its date."""
    ran: str
    """Date of the run."""
    marks: dict[str, str]
    """Marks by feature."""
    notes: list[str]
    """Reasons for missing ticks, and other remarks."""

    @property
    def is_whole(self) -> bool:
        """True if every current feature was tried, and none failed."""
        return list(self.marks) == list(FEATURES) and CROSS not in self.marks.values()


class Trial:
    """Features of one release, tried one after the other.

    Args:
        release: None if an earlier call has tried all features.
    """

    def __init__(self, release: Release | None, column: Column) -> None:
        self._release = release
        self._column = column

    def check(self, feature: str) -> None:
        """Try `feature`, and mark the result; an exception of the feature is raised again.

        Raises:
            pytest.skip.Exception: the release does not have the feature, or a required one failed.
        """
        marks, notes = self._column.marks, self._column.notes
        if self._release is None:
            if marks[feature] == NONE:
                pytest.skip("an earlier call has skipped this feature")
            return
        label = f"{self._column.tag}, {feature}"
        if CROSS in list(marks.values())[:_REQUIRED]:
            marks[feature] = NONE
            pytest.skip("stock does not train here, or nothing was saved")
        try:
            note = FEATURES[feature](self._release)
        except NotHereError as reason:
            marks[feature] = NONE
            if str(reason):
                notes.append(f"{label}: {reason}")
            pytest.skip(str(reason) or "not tried with this release")
        except Exception as error:
            marks[feature] = CROSS
            kind = "" if isinstance(error, CellError) else f"{type(error).__name__}: "
            notes.append(f"{label}: {kind}{error}")
            raise
        marks[feature] = TICK
        if note:
            notes.append(f"{label}: {note}")


class Matrix:
    """Pytest plugin with the releases to try and their results."""

    def __init__(self, clone: Path, where: Path, tags: Sequence[str] = tuple(TAGS)) -> None:
        """Args: `where`: directory of trees, checkpoints and logs, new or of an earlier call."""
        self.tags = tags
        self.columns: list[Column] = []
        self._clone = clone
        self._where = where

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[MATRIX] = self

    @contextlib.contextmanager
    def trial(self, tag: str) -> Iterator[Trial]:
        """Yield an object that tries the features of a release; store the marks afterwards."""
        kept = self._where / tag / "column.json"
        if kept.is_file():
            column = Column(**json.loads(kept.read_text()))
            if column.is_whole:
                self.columns.append(column)
                yield Trial(None, column)
                return
        shutil.rmtree(self._where / tag, ignore_errors=True)
        tree = extract(tag, self._where, self._clone)
        revision = _revision(self._clone, TAGS[tag])
        column = Column(tag, revision, datetime.date.today().isoformat(), {}, [])
        try:
            yield Trial(Release(tree, tree.root.parent), column)
        finally:
            end_nurseries()
        self.columns.append(column)
        kept.write_text(json.dumps(dataclasses.asdict(column)))


#: The plugin of a run of pytest that `scripts/compat` has started.
MATRIX = pytest.StashKey[Matrix]()


def extract(tag: str, where: Path, clone: Path) -> Tree:
    """Return the tree of a release; extract it if no earlier call has done so."""
    root = where / tag / "tree"
    if root.is_dir():
        return Tree(tag, root)
    root.parent.mkdir(parents=True, exist_ok=True)
    return Tree.extract(clone, tag, TAGS[tag], root)


def _revision(clone: Path, revision: str) -> str:
    command = ["git", "log", "-1", "--format=%h of %cs", "--abbrev=10", revision]
    return subprocess.run(
        command, cwd=clone, check=True, capture_output=True, text=True
    ).stdout.strip()


def table(columns: list[Column]) -> Iterable[str]:
    """Yield lines of Markdown: a table with a row per feature, and notes below it."""
    days = sorted({column.ran for column in columns})
    yield f"Ran {' to '.join(dict.fromkeys([days[0], days[-1]]))}: " + ", ".join(
        f"{column.tag} ({column.revision})" for column in columns
    )
    yield ""
    yield "| | " + " | ".join(column.tag.removeprefix("core_v") for column in columns) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for name in FEATURES:
        yield f"| {name} | " + " | ".join(column.marks[name] for column in columns) + " |"
    notes = [note for column in columns for note in column.notes]
    if notes:
        yield ""
        yield from (f"- {note.partition('; log: ')[0]}" for note in notes)


def write_page(lines: list[str]) -> None:
    """Replace the table in the page on releases."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(FINISH)
    PAGE.write_text(f"{before}{BEGIN}" + "".join(f"{line}\n" for line in lines) + FINISH + after)
