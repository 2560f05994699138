"""Features that `scripts/compat` tries with one release, in runs of its own `pretrain_gpt.py`.

Losses and gradient norms are compared as printed, tensors of checkpoints bit for bit.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_flashckpt.catalog.listing import committed_iterations
from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.storage.opening import open_store
from patches.imports import TRAINING, swapped
from patches.patch import TAGS, PatchError, apply
from tests.support.megatron_jobs import assemble, differing, tensors, truncated_copy
from tools.compat.tree import Run, Tree

TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "2"),
    "--disable-bias-linear",
)
HALF, END = 3, 6
DISTRIBUTED = "--use-distributed-optimizer"
#: Releases whose distributed optimizer calls Transformer Engine at every precision.
PLAIN_ONLY = ("core_v0.12.3",)
NO_DISTRIBUTED = "its distributed optimizer does not run without Transformer Engine"
_CHECKED, _FIRST_STEP = "flashckpt: self-check of", f" iteration        1/{END:8d} |"


class CellError(Exception):
    """A feature does not work with a release."""


class NotHereError(Exception):
    """The release does not have a feature, or stock cannot run it on a CPU.

    The message becomes a note below the table; an empty message does not.
    """


class Release:
    """Runs of one release. A feature is a method that raises CellError; the order matters."""

    def __init__(self, tree: Tree, where: Path) -> None:
        self.tree = tree
        self.where = where
        self._format: str | None = None
        """Flags of the format in which stock wrote its checkpoints; None if stock wrote none."""
        self._unwritten = ""
        """Formats in which stock could not write checkpoints here, and why."""

    # ------------------------------------------------------------------ the features

    def trains(self) -> None:
        """Stock trains on this machine, as the reference, and saves if it can."""
        if sorted(self.stock.figures) != list(range(1, END + 1)):
            raise CellError(self.stock.reason("stock itself does not train here"))

    def saves(self) -> None:
        """An unedited tree under the launcher trains as stock does and commits both saves."""
        run = self._launched
        if run.figures != self.stock.figures:
            raise CellError(run.reason("trains otherwise than stock"))
        self._committed(run, "A")

    def resumes(self) -> None:
        """A tree with patches/<tag>.patch resumes from storage like an uninterrupted run."""
        save = truncated_copy(self.where / "A", self.where / "B", HALF)
        flags = (*TP2, *self._newest)
        run = self.run("B", flags, save=save, tree=self._patched, entry_point="stock")
        self.same_end(run, save)

    def checks(self) -> None:
        """The self-check runs before the first step: launched, and patched without --load."""
        for run in (self._launched, self._overlapped):
            checked, stepped = run.log.find(_CHECKED), run.log.find(_FIRST_STEP)
            if not 0 <= checked < stepped:
                raise CellError(run.reason("no self-check before the first step"))

    def refuses(self) -> None:
        """Another release's patch is refused, with the right name, and the tree is not changed."""
        tree = self.tree.copy(self.where / "refusing")
        before = {path: (tree.root / path).read_bytes() for path in self._training(tree)}
        for other in set(TAGS) - {self.tree.tag}:
            try:
                apply(tree.root, other)
            except PatchError as error:
                if f"take patches/{self.tree.tag}.patch" not in str(error):
                    raise CellError(f"{other}: {error}") from error
            else:
                raise CellError(f"patches/{other}.patch is applied")
        if before != {path: (tree.root / path).read_bytes() for path in before}:
            raise CellError("a refusal has changed the tree")

    def reshards(self) -> None:
        """Swapped imports under PP2 x DP2 give the same losses, except for rounding."""
        save = truncated_copy(self.where / "A", self.where / "D", HALF)
        run = self.run("D", PP2, save=save, tree=self._swapped(), entry_point="stock")
        for iteration in (HALF + 1, END):
            for printed, expected in zip(
                run.figures.get(iteration, (0.0, 0.0)), self.stock.figures[iteration], strict=True
            ):
                if abs(printed - expected) > 0.02 * expected:
                    raise CellError(run.reason(f"iteration {iteration}: {printed}, not {expected}"))
        shapes = [
            {name: tuple(whole.shape) for name, whole in assemble(root, END).items()}
            for root in (self.where / "A", save)
        ]
        if shapes[0] != shapes[1]:
            raise CellError(run.reason("saves other tensors than under TP2 x DP2"))

    def restarts(self) -> None:
        """After a rank is killed in a save, all ranks restart from memory, bit for bit."""
        save = self.where / "C"
        fault = f"rank1:save.granted:2:KILL:{self.where / 'killed'}"
        run = self.run("C", TP2, save=save, env={"FLASHCKPT_FAULT": fault}, restarts=1)
        if f"iteration {HALF} was restored from memory" not in run.log:
            raise CellError(run.reason("was not restored from memory"))
        self.same_end(run, save)

    def distributes(self) -> None:
        """With the distributed optimizer, in all runs above, each replica saves its own part."""
        if self.tree.tag in PLAIN_ONLY:
            raise NotHereError(NO_DISTRIBUTED)
        masters = [
            {name for of, name in tensors(self.where / "A", END) if of == rank} for rank in range(4)
        ]
        if not all(any(name.startswith("master/") for name in of_rank) for of_rank in masters):
            raise CellError("a rank saves no part of the masters")

    def overlaps(self) -> None:
        """With overlapped reduce and gather, every saved weight equals its rounded master."""
        if self.tree.tag in PLAIN_ONLY:
            raise NotHereError(NO_DISTRIBUTED)
        self._committed(self._overlapped, "E")
        wholes = assemble(self.where / "E", END)
        stale = [
            key
            for kind, key in wholes
            if kind == "master"
            and not (wholes[kind, key].bfloat16() == wholes["weight", key]).all()
        ]
        if stale:
            raise CellError(self._overlapped.reason(f"stale weights: {', '.join(stale)}"))

    def saves_asynchronously(self) -> None:
        """With Megatron's --async-save, our saves replace Megatron's."""
        if not self._asynchronous:
            raise NotHereError("has no --async-save")
        if "Disabling --async-save" in self._overlapped.log:
            raise CellError(self._overlapped.reason("Megatron has switched --async-save off"))
        self._committed(self._overlapped, "E")

    def mixes_experts(self) -> None:
        """Four experts on two ranks (EP2) resume from storage like an uninterrupted run."""
        whole = self.run("G", EXPERTS, save=self.where / "G", ranks=2)
        if sorted(whole.figures) != list(range(1, END + 1)):
            if "experts of Megatron's legacy models are not saved" in whole.log:
                raise NotHereError("refused with a message: its experts are of the legacy model")
            stock = self.run("H", EXPERTS, entry_point="stock", ranks=2)
            if sorted(stock.figures) != list(range(1, END + 1)):
                raise NotHereError(stock.reason("stock does not train experts here"))
            raise CellError(whole.reason("does not train as stock does"))
        save = truncated_copy(self.where / "G", self.where / "I", HALF)
        self.same_end(self.run("I", EXPERTS, save=save, ranks=2), save, whole, "G")

    def takes_over(self) -> str | None:
        """A job resumes from stock's checkpoint in place, bit for bit; its next save is ours."""
        if self._format is None:
            raise NotHereError(self._unwritten)
        save = truncated_copy(self.where / "stock", self.where / "F", HALF)
        run = self.run("F", (*TP2, *self._format.split()), save=save)
        try:
            self.same_end(run, save)
        except CellError:
            save = truncated_copy(self.where / "stock", self.where / "J", HALF)
            stock = self.run("J", (*TP2, *self._format.split()), save=save, entry_point="stock")
            if stock.figures.get(END) == self.stock.figures[END]:
                raise
            raise NotHereError(stock.reason("stock itself does not resume from it here")) from None
        return f"from its torch format; {self._unwritten}" if self._unwritten else None

    # ------------------------------------------------------------------ runs that features share

    @functools.cached_property
    def stock(self) -> Run:
        """Run of stock that saves in its newest format that works on this machine."""
        save = self.where / "stock"
        for number, flags in enumerate(self._formats()):
            run = self.run(
                f"stock-{number}", (*TP2, *flags.split()), save=save, entry_point="stock"
            )
            if END in run.figures and (save / TRACKER).is_file():
                self._format = flags
                return run
            self._unwritten = run.reason(f"with '{flags}' stock itself does not save here")
            shutil.rmtree(save, ignore_errors=True)
        return self.run("stock", TP2, entry_point="stock")

    def _formats(self) -> tuple[str, ...]:
        if self.tree.knows("ckpt_format"):
            return "--ckpt-format torch_dist", "--ckpt-format torch"
        return ("--use-dist-ckpt", "") if self.tree.knows("use_dist_ckpt") else ("",)

    @property
    def _newest(self) -> list[str]:
        """Flags of stock's newest format, which our saves must ignore."""
        return self._formats()[0].split()

    @functools.cached_property
    def _launched(self) -> Run:
        return self.run("A", (*TP2, *self._newest), save=self.where / "A")

    @functools.cached_property
    def _overlapped(self) -> Run:
        """Run of the patched tree without `--load`, with overlapped reduce and gather."""
        overlap = ("--overlap-grad-reduce", "--overlap-param-gather")
        flags = () if self.tree.tag in PLAIN_ONLY else overlap
        return self.run(
            "E",
            (*flags, *self._asynchronous),
            save=self.where / "E",
            load=False,
            tree=self._patched,
            entry_point="stock",
            ranks=2,
        )

    @functools.cached_property
    def _asynchronous(self) -> tuple[str, ...]:
        """Flags of an asynchronous save; empty if this release has none."""
        if not self.tree.knows("async_save"):
            return ()
        # Later releases without these flags switch --async-save off, or need a package for GPUs.
        more = {
            "use_persistent_ckpt_worker": "--use-persistent-ckpt-worker",
            "async_strategy": "--async-strategy mcore",
        }
        given = [*self._newest, *(flag for name, flag in more.items() if self.tree.knows(name))]
        return ("--async-save", *" ".join(given).split())

    @functools.cached_property
    def _patched(self) -> Tree:
        tree = self.tree.copy(self.where / "patched")
        apply(tree.root, self.tree.tag)
        return tree

    def _swapped(self) -> Tree:
        """Return a tree with the imports of `training.py` swapped by hand."""
        tree = self.tree.copy(self.where / "swapped")
        for path in self._training(tree):
            (tree.root / path).write_text(swapped((tree.root / path).read_text()))
        return tree

    @staticmethod
    def _training(tree: Tree) -> list[str]:
        return [path for path in TRAINING if (tree.root / path).is_file()]

    # ------------------------------------------------------------------ checks of a run

    def _committed(self, run: Run, name: str) -> None:
        save = self.where / name
        tracker = save / TRACKER
        if not tracker.is_file() or tracker.read_text() != str(END):
            raise CellError(run.reason("the last save is not committed"))
        committed = committed_iterations(open_store(save))
        for iteration in (HALF, END):
            if iteration not in committed:
                raise CellError(run.reason(f"no save of iteration {iteration} in our format"))

    def same_end(self, run: Run, save: Path, whole: Run | None = None, name: str = "A") -> None:
        """Raise CellError if a run from HALF on does not end as `whole`, which saved to `name`."""
        self.same_figures(run, whole)
        wrong = differing(tensors(self.where / name, END), tensors(save, END))
        if wrong:
            raise CellError(run.reason(f"not bit-equal at the end: {', '.join(map(str, wrong))}"))

    def same_figures(self, run: Run, whole: Run | None = None) -> None:
        """Raise CellError if a run from HALF on prints other figures than `whole`, or stock."""
        expected = (whole or self.stock).figures
        # 0.16.1 and later print the mean of two losses in the second line after a start.
        for iteration in (HALF + 1, END):
            if run.figures.get(iteration) != expected[iteration]:
                raise CellError(run.reason(f"iteration {iteration} is not as if uninterrupted"))

    def run(
        self,
        name: str,
        flags: tuple[str, ...],
        *,
        save: Path | None = None,
        load: bool = True,
        tree: Tree | None = None,
        entry_point: str = "launch",
        env: dict[str, str] | None = None,
        restarts: int = 0,
        ranks: int = 4,
    ) -> Run:
        arguments = [*flags, "--train-iters", str(END)]
        if self.tree.tag not in PLAIN_ONLY:
            arguments.append(DISTRIBUTED)
        if save is not None:
            arguments += ["--save", str(save), "--save-interval", str(HALF)]
            arguments += ["--load", str(save)] if load else []
        log = self.where / f"{name}.log"
        environment = {
            "FLASHCKPT_RUNTIME_DIR": str(self.where / "run"),
            "FLASHCKPT_AGENT__GRACE_S": "120",
            "FLASHCKPT_AGENT__KEEP_UNWRITTEN_S": "0",  # no agent outlives its test
            **(env or {}),
        }
        return (tree or self.tree).run(arguments, log, entry_point, environment, restarts, ranks)


#: Features in the order in which they run: a later one reads the checkpoints of earlier ones. The
#: text that a feature returns becomes a note below the table.
FEATURES: dict[str, Callable[[Release], str | None]] = {
    "stock trains on these CPU ranks": Release.trains,
    "launcher, nothing edited: trains as stock, saves": Release.saves,
    "patch: resumes bit for bit": Release.resumes,
    "patch of another release is refused": Release.refuses,
    "swapped imports: loads under PP2 x DP2": Release.reshards,
    "checks itself before the first step": Release.checks,
    "killed rank: restarts from memory, bit for bit": Release.restarts,
    "distributed optimizer": Release.distributes,
    "overlapped reduce and gather": Release.overlaps,
    "`--async-save`": Release.saves_asynchronously,
    "experts (EP2): resumes bit for bit": Release.mixes_experts,
    "resumes from Megatron's own checkpoint": Release.takes_over,
}
