"""Version x feature, each tick from a run of that release's own `pretrain_gpt.py` on CPU ranks.

    MEGATRON_LM=/path/to/clone scripts/compat [TAG ...]
    MEGATRON_LM=/path/to/clone scripts/compat --upstream-tests [TAG ...]

Trees come from the clone with `git archive`; nothing is written to it. Four gloo ranks, TP2 x DP2,
distributed optimizer, bf16, dropout on. With `--upstream-tests`, instead of that, what
`compat_upstream.py` says: Megatron's own unit tests of saving and loading.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import compat_upstream
from compat_tree import Run, Tree
from rich.console import Console
from rich.progress import Progress

from megatron_flashckpt.layout.names import TRACKER, iteration_dir
from patches import TAGS, PatchError, apply
from tests.megatron.jobs import assemble, differing, tensors, truncated_copy

TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
HALF, END = 3, 6
DISTRIBUTED = "--use-distributed-optimizer"
#: Its distributed optimizer calls into Transformer Engine, whatever the precision.
PLAIN_ONLY = ("core_v0.12.3",)


class CellError(Exception):
    """A feature does not work with a release."""


class Release:
    """The runs of one release. Every feature is a method that raises CellError; order matters."""

    def __init__(self, tree: Tree, where: Path) -> None:
        self._tree = tree
        self._where = where
        self._stock: Run | None = None

    def trains(self) -> None:
        """Stock runs on this machine at all: the reference."""
        self._stock = self._run("stock", TP2, door="stock")
        if sorted(self._stock.figures) != list(range(1, END + 1)):
            raise CellError(self._stock.reason("stock itself does not train here"))

    def saves(self) -> None:
        """Unedited, through the launcher: trains as stock does, and both saves are committed."""
        run = self._run("A", TP2, save=self._where / "A")
        assert self._stock is not None
        if run.figures != self._stock.figures:
            raise CellError(run.reason("trains otherwise than stock"))
        if (self._where / "A" / TRACKER).read_text() != str(END):
            raise CellError(run.reason("the last save is not committed"))

    def resumes(self) -> None:
        """Patched with patches/<tag>.patch: goes on from storage as if it had never stopped."""
        save = truncated_copy(self._where / "A", self._where / "B", HALF)
        patched = self._tree.copy(self._where / "patched")
        apply(patched.root, self._tree.tag)
        run = self._run("B", TP2, save=save, tree=patched, door="stock")
        self._same_end(run, save)

    def restarts(self) -> None:
        """A rank is killed while it saves, torchrun restarts all: memory, bit for bit."""
        save = self._where / "C"
        fault = f"rank1:save.granted:2:KILL:{self._where / 'killed'}"
        run = self._run("C", TP2, save=save, env={"FLASHCKPT_FAULT": fault}, restarts=1)
        if f"iteration {HALF} was restored from memory" not in run.log:
            raise CellError(run.reason("was not restored from memory"))
        self._same_end(run, save)

    def reshards(self) -> None:
        """Goes on under PP2 x DP2: same weights, so the same losses but for rounding."""
        save = truncated_copy(self._where / "A", self._where / "D", HALF)
        run = self._run("D", PP2, save=save)
        assert self._stock is not None
        for iteration in (HALF + 1, END):
            for found, expected in zip(
                run.figures.get(iteration, (0.0, 0.0)), self._stock.figures[iteration], strict=True
            ):
                if abs(found - expected) > 0.02 * expected:
                    raise CellError(run.reason(f"iteration {iteration}: {found}, not {expected}"))
        shapes = [
            {name: tuple(whole.shape) for name, whole in assemble(root, END).items()}
            for root in (self._where / "A", save)
        ]
        if shapes[0] != shapes[1]:
            raise CellError(run.reason("saves other tensors than under TP2 x DP2"))

    def overlaps(self) -> None:
        """Overlapped reduce and gather: every weight that is saved is its master, rounded."""
        save = self._where / "E"
        overlapped = (*TP2, "--overlap-grad-reduce", "--overlap-param-gather")
        run = self._run("E", overlapped, save=save)
        if not (save / iteration_dir(END)).is_dir():
            raise CellError(run.reason("does not save"))
        wholes = assemble(save, END)
        stale = [
            key
            for kind, key in wholes
            if kind == "master"
            and not (wholes[kind, key].bfloat16() == wholes["weight", key]).all()
        ]
        if stale:
            raise CellError(run.reason(f"stale weights: {', '.join(stale)}"))

    def _same_end(self, run: Run, save: Path) -> None:
        assert self._stock is not None
        # In its second line after a start 0.16.1 and later print the mean of two losses.
        for iteration in (HALF + 1, END):
            if run.figures.get(iteration) != self._stock.figures[iteration]:
                raise CellError(run.reason(f"iteration {iteration} is not as if uninterrupted"))
        wrong = differing(tensors(self._where / "A", END), tensors(save, END))
        if wrong:
            raise CellError(run.reason(f"not bit-equal at the end: {', '.join(map(str, wrong))}"))

    def _run(
        self,
        name: str,
        layout: tuple[str, ...],
        *,
        save: Path | None = None,
        tree: Tree | None = None,
        door: str = "launch",
        env: dict[str, str] | None = None,
        restarts: int = 0,
    ) -> Run:
        arguments = [*layout, "--train-iters", str(END)]
        if self._tree.tag not in PLAIN_ONLY:
            arguments.append(DISTRIBUTED)
        if save is not None:
            arguments += ["--save", str(save), "--load", str(save), "--save-interval", str(HALF)]
        log = self._where / f"{name}.log"
        environment = {
            "FLASHCKPT_RUNTIME_DIR": str(self._where / "run"),
            "FLASHCKPT_AGENT__GRACE_S": "120",
            **(env or {}),
        }
        return (tree or self._tree).run(arguments, log, door, environment, restarts)


FEATURES: dict[str, Callable[[Release], None]] = {
    "stock runs here": Release.trains,
    "saves, trains as stock": Release.saves,
    "patch; resumes bit-exact": Release.resumes,
    "restart from memory, bit-exact": Release.restarts,
    "loads under PP2 DP2": Release.reshards,
    "overlapped gather": Release.overlaps,
}


def cells(release: Release, out: Console, tag: str, done: Callable[[], object]) -> list[str]:
    """Return a tick, a cross or a dash (not reached) per feature."""
    found: list[str] = []
    for name, feature in FEATURES.items():
        # Without stock, or a save to go on from, there is nothing to be said of the rest.
        if "\u2717" in found[:2] or (feature is Release.overlaps and tag in PLAIN_ONLY):
            found.append("-")
        else:
            try:
                feature(release)
                found.append("\u2713")
            except (CellError, PatchError, OSError) as error:
                found.append("\u2717")
                out.print(f"{tag}, {name}: {error}")
        done()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/compat", formatter_class=argparse.RawTextHelpFormatter, description=__doc__
    )
    parser.add_argument("tags", nargs="*", metavar="TAG", help=f"of {', '.join(TAGS)}")
    parser.add_argument(
        "--keep", type=Path, help="put trees, checkpoints and logs there; keep them"
    )
    parser.add_argument(
        "--upstream-tests", action="store_true", help="Megatron's own tests of saving and loading"
    )
    args = parser.parse_args()
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

    def extract(tag: str) -> Tree:
        (where / tag).mkdir(parents=True)
        return Tree.extract(Path(clone), tag, TAGS[tag], where / tag / "tree")

    if args.upstream_tests:
        failed = compat_upstream.main(args.tags or compat_upstream.TAGS, extract)
    else:
        failed = matrix(args.tags or list(TAGS), extract)
    if not args.keep:
        shutil.rmtree(where)
    sys.exit(bool(failed))


def matrix(tags: list[str], extract: Callable[[str], Tree]) -> int:
    """Print version x feature; return how many cells failed."""
    out = Console(soft_wrap=True, highlight=False, markup=False)
    lines = ["| " + " | ".join(["release", *FEATURES]) + " |", "|---" * (1 + len(FEATURES)) + "|"]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(tags) * len(FEATURES))
        for tag in tags:
            progress.update(task, description=tag)
            tree = extract(tag)
            ticks = cells(Release(tree, tree.root.parent), out, tag, lambda: progress.advance(task))
            lines.append("| " + " | ".join([tag, *ticks]) + " |")
    crosses = sum(line.count("\u2717") for line in lines)
    # Markdown, for the README.
    print("\n".join(lines))
    print(f"with the plain optimizer: {', '.join(PLAIN_ONLY)}; {crosses or 'none'} failed")
    return crosses


if __name__ == "__main__":
    main()
