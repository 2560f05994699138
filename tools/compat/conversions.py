"""Conversions between our format, Megatron's `torch` and DLRover's, in a release's tree.

`flashckpt convert` converts checkpoints of the legacy GPT of early 2024, which the tests of
conversions cannot run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from megatron_flashckpt.file_format.file_names import iteration_dir
from tools.compat import real_dlrover
from tools.compat.release import HALF, TP2, CellError, NotHereError, Release


def follows_dlrover(release: Release) -> None:
    """Convert a checkpoint of real DLRover and resume from it: equal to an uninterrupted run."""
    _only_legacy(release)
    try:
        site = real_dlrover.install(release.where.parent)
    except subprocess.CalledProcessError as error:
        raise NotHereError(f"DLRover cannot be installed: {error.stderr.strip()[-200:]}") from error
    dlrover_save = release.where / "dlrover"
    tree = real_dlrover.swapped(release.tree, release.where / "with-dlrover")
    run = real_dlrover.run(
        tree,
        site,
        release.where,
        lambda env: release.run(
            "dlrover", TP2, save=dlrover_save, tree=tree, entry_point="stock", env=env
        ),
    )
    if run.figures != release.stock.figures:
        raise CellError(run.reason("with DLRover it trains otherwise than stock"))
    if not (dlrover_save / iteration_dir(HALF) / "rank_00003").is_dir():
        raise CellError(run.reason("DLRover has not saved"))
    _resume(release, dlrover_save, "K")


def follows_torch(release: Release) -> None:
    """Convert a checkpoint of stock and resume from it: equal to an uninterrupted run."""
    _only_legacy(release)
    _resume(release, release.where / "stock", "L")


def leaves_to_torch(release: Release) -> None:
    """Convert our checkpoint to `torch`; stock resumes from it, equal to an uninterrupted run."""
    _only_legacy(release)
    save = release.where / "M"
    _convert(release, release.where / "A", save, "torch")
    run = release.run("M", TP2, save=save, entry_point="stock")
    release.same_figures(run)


def _only_legacy(release: Release) -> None:
    if (release.tree.root / "megatron/training").is_dir():
        raise NotHereError("")


def _resume(release: Release, source: Path, name: str) -> None:
    save = release.where / name
    _convert(release, source, save, "flashckpt")
    release.same_end(release.run(name, TP2, save=save), save)


def _convert(release: Release, source: Path, destination: Path, to: str) -> None:
    """Convert the checkpoint of iteration HALF with the release's own megatron.core."""
    shutil.rmtree(destination, ignore_errors=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megatron_flashckpt.cli", "convert", source, destination),
            *("--to", to, "--iteration", str(HALF)),
        ],
        cwd=release.tree.root,
        # The stand-in for CUDA is installed only if LOCAL_RANK is set.
        env={**release.tree.environment(release.where), "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        printed = done.stderr.strip().splitlines()
        reason = printed[-1] if printed else done.returncode
        raise CellError(f"flashckpt convert --to {to}: {reason}")
