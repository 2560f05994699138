"""Version x feature, each tick from a run of that release's own `pretrain_gpt.py` on CPU ranks.

    MEGATRON_LM=/path/to/clone scripts/compat [TAG ...] [--keep DIR] [--readme]
    MEGATRON_LM=/path/to/clone scripts/compat --upstream-tests [TAG ...]

Trees come from the clone with `git archive`; nothing is written to it. Four gloo ranks, TP2 x DP2,
distributed optimizer, bf16, dropout on; `release.py` says what each feature is. With
`--keep` a later call goes on where this one was ended: releases that passed are not tried again.
With `--upstream-tests`, instead of that, what `upstream.py` says: Megatron's own unit tests
of saving and loading.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from patches.patch import TAGS
from tests.compat import upstream
from tests.compat.conversions import follows_dlrover, follows_torch, leaves_to_torch
from tests.compat.release import FEATURES as OF_RELEASE
from tests.compat.release import CellError, NotHereError, Release
from tests.compat.tree import REPO, Tree, end_nurseries

TICK, CROSS, NONE = "\u2713", "\u2717", "-"
README = REPO / "README.md"
#: In this order: later ones look at what earlier ones have left. What one returns is worth a note.
FEATURES: dict[str, Callable[[Release], str | None]] = {
    **OF_RELEASE,
    "converted from DLRover: resumes bit for bit": follows_dlrover,
    "converted from Megatron's `torch`: resumes bit for bit": follows_torch,
    "converted to Megatron's `torch`: stock resumes": leaves_to_torch,
}
#: What `--readme` writes stands between these lines.
BEGIN, FINISH = "<!-- scripts/compat --readme -->\n", "<!-- end of scripts/compat -->\n"


@dataclasses.dataclass(frozen=True)
class Column:
    """What was found out about one release."""

    tag: str
    revision: str
    """The commit of the tree, and its day."""
    ran: str
    """The day."""
    marks: dict[str, str]
    """By feature."""
    notes: list[str]
    """Why marks are no ticks, and what else is worth knowing."""

    @property
    def failed(self) -> int:
        """How many features do not work."""
        return list(self.marks.values()).count(CROSS)


def try_all(release: Release, tag: str, revision: str, done: Callable[[], object]) -> Column:
    """Run every feature, in order."""
    marks: dict[str, str] = {}
    notes: list[str] = []
    for name, feature in FEATURES.items():
        # Without stock, or a save to go on from, there is nothing to be said of the rest.
        if CROSS in list(marks.values())[:2]:
            marks[name] = NONE
        else:
            try:
                if said := feature(release):
                    notes.append(f"{tag}, {name}: {said}")
                marks[name] = TICK
            except NotHereError as reason:
                marks[name] = NONE
                if str(reason):
                    notes.append(f"{tag}, {name}: {reason}")
            except CellError as error:
                marks[name] = CROSS
                notes.append(f"{tag}, {name}: {error}")
            except Exception as error:  # whatever it is, there are other features and releases
                marks[name] = CROSS
                notes.append(f"{tag}, {name}: {type(error).__name__}: {error}")
        done()
    return Column(tag, revision, datetime.date.today().isoformat(), marks, notes)


def column(tag: str, where: Path, clone: Path, done: Callable[[], object]) -> Column:
    """Return what an earlier call with this directory has found out, or find out now."""
    kept = where / tag / "column.json"
    if kept.is_file():
        found = Column(**json.loads(kept.read_text()))
        if list(found.marks) == list(FEATURES) and not found.failed:
            return found
    shutil.rmtree(where / tag, ignore_errors=True)
    tree = extract(tag, where, clone)
    try:
        found = try_all(Release(tree, tree.root.parent), tag, _revision(clone, TAGS[tag]), done)
    finally:
        end_nurseries()
    kept.write_text(json.dumps(dataclasses.asdict(found)))
    return found


def extract(tag: str, where: Path, clone: Path) -> Tree:
    """Return the files of a release, which may be there from an earlier call."""
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
    """Yield lines of Markdown: a row per feature, and notes below."""
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


def write_readme(lines: list[str]) -> None:
    """Put the table in the place of the one in the README."""
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(FINISH)
    README.write_text(f"{before}{BEGIN}" + "".join(f"{line}\n" for line in lines) + FINISH + after)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/compat", formatter_class=argparse.RawTextHelpFormatter, description=__doc__
    )
    parser.add_argument("tags", nargs="*", metavar="TAG", help=f"of {', '.join(TAGS)}")
    parser.add_argument(
        "--keep", type=Path, help="put trees, checkpoints, logs there; go on from what is there"
    )
    parser.add_argument(
        "--readme", action="store_true", help="put the table in the place of the README's"
    )
    parser.add_argument(
        "--upstream-tests", action="store_true", help="Megatron's own tests of saving and loading"
    )
    args = parser.parse_args()
    if args.readme and args.tags:
        sys.exit("scripts/compat: the README's table has all releases: name none with --readme")
    unknown = set(args.tags) - set(TAGS)
    if unknown:
        sys.exit(f"scripts/compat: no {', '.join(sorted(unknown))}; there are {', '.join(TAGS)}")
    clone = os.environ.get("MEGATRON_LM")
    if not clone:
        sys.exit(
            "scripts/compat: skipped, no Megatron-LM at hand: clone NVIDIA/Megatron-LM and set "
            "MEGATRON_LM to the clone"
        )
    where = args.keep or Path(tempfile.mkdtemp(prefix="flashckpt-compat-"))
    if args.upstream_tests:
        failed = upstream.main(
            args.tags or upstream.TAGS, lambda tag: extract(tag, where, Path(clone))
        )
    else:
        failed = matrix(args.tags or list(TAGS), where, Path(clone), readme=args.readme)
    if not args.keep:
        shutil.rmtree(where)
    sys.exit(bool(failed))


def matrix(tags: list[str], where: Path, clone: Path, *, readme: bool) -> int:
    """Print version x feature; return how many cells failed."""
    out = Console(soft_wrap=True, highlight=False, markup=False)
    columns = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(tags) * len(FEATURES))
        for number, tag in enumerate(tags):
            progress.update(task, description=tag, completed=number * len(FEATURES))
            columns.append(column(tag, where, clone, lambda: progress.advance(task)))
            for note in columns[-1].notes:
                out.print(note)
    lines = list(table(columns))
    print("\n".join(lines))
    if readme:
        write_readme(lines)
    return sum(column.failed for column in columns)


if __name__ == "__main__":
    main()
