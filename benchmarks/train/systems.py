"""Checkpoint systems of `python -m benchmarks train`, and the Megatrons that they run in."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.train.job import Megatron, kept_environment
from benchmarks.train.sizes import SIZES
from patches.patch import TAGS
from tests.compat import real_dlrover
from tests.compat.tree import Tree

REPO = Path(__file__).resolve().parents[2]
#: Megatron commit that DLRover's documentation uses, with its legacy GPT.
OLD = "cb995d5"

_COMMON = (
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-iters 1000 --lr-warmup-iters 2 "
    "--weight-decay 0.01 --clip-grad 1.0 --bf16 --vocab-size 8000 "
    "--tokenizer-type NullTokenizer --mock-data --split 99,1,0 --num-workers 0 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --log-interval 1 --eval-interval 100000 --eval-iters 0 "
    "--distributed-timeout-minutes 3"
).split()
#: Arguments that cb995d5 does not have.
_NEWER = ("--no-rope-fusion", "--attention-backend", "unfused")


class UnavailableError(Exception):
    """A system cannot run here; the message names the reason."""


@dataclasses.dataclass(frozen=True)
class System:
    """One way to save checkpoints, or training without saves."""

    name: str
    label: str
    flags: tuple[str, ...] = ()
    runner: tuple[str, ...] = (sys.executable,)
    megatron: str = "installed"
    saves: bool = True
    from_memory: bool = False
    """True if killed ranks restart from memory."""
    baseline: str = "none"
    """Name of the run without saves for comparison."""
    leaves_out_saves: bool = False
    """True if the system skips a save while it writes the last one."""
    hangs_with: str | None = None
    """Output of a run that hangs and may be run once more."""


_TORCH_DIST = ("--ckpt-format", "torch_dist", "--ckpt-assume-constant-structure")
#: Without the last two flags Megatron 0.17.1 switches asynchronous saves off, or imports a package
#: that needs a GPU.
_ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")

SYSTEMS: tuple[System, ...] = (
    System("none", "no saves", saves=False),
    System(
        "flashckpt",
        "megatron_flashckpt",
        runner=(sys.executable, "-m", "megatron_flashckpt.launch"),
        from_memory=True,
    ),
    System("torch_dist-async", "Megatron torch_dist, async", (*_TORCH_DIST, *_ASYNC)),
    System("torch_dist", "Megatron torch_dist, sync", _TORCH_DIST),
    System("torch", "Megatron torch (legacy)", ("--ckpt-format", "torch")),
    System(
        "none-old",
        f"no saves, Megatron {OLD}",
        megatron="old",
        saves=False,
        baseline="none-old",
    ),
    System(
        "dlrover",
        f"DLRover {real_dlrover.VERSION}, Megatron {OLD}",
        megatron="dlrover",
        baseline="none-old",
        leaves_out_saves=True,
        # DLRover forks its saver from a rank with threads; sometimes the saver hangs at its start.
        hangs_with="Timed out waiting for socket server",
    ),
)


def _flags(size: str, *, distributed: bool) -> tuple[str, ...]:
    optimizer = ("--use-distributed-optimizer",) if distributed else ()
    return (*_COMMON, *SIZES[size].model, *optimizer)


def installed(size: str, *, distributed: bool = True) -> Megatron:
    """Return the Megatron of this environment, on CPU ranks."""
    path = [str(REPO / "tests/cpu_megatron"), str(REPO)]
    return Megatron(
        script=REPO / "scripts/pretrain_gpt_tiny.py",
        flags=(*_flags(size, distributed=distributed), *_NEWER),
        env={
            **kept_environment(),
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "CPU_CUDA_STUBS": "triton apex",
            "PYTHONWARNINGS": "ignore",
        },
        cwd=REPO,
    )


def old_trees(
    root: Path, site_parent: Path, size: str, *, distributed: bool = True
) -> dict[str, Megatron]:
    """Return Megatron cb995d5 unchanged (`old`) and with DLRover's save and load (`dlrover`).

    Args:
        site_parent: directory for the installation of DLRover, new or of an earlier call.

    Raises:
        UnavailableError: there is no clone of Megatron-LM, or DLRover cannot be installed.
    """
    clone = os.environ.get("MEGATRON_LM")
    if not clone:
        raise UnavailableError(
            "it needs its own Megatron: clone NVIDIA/Megatron-LM and set MEGATRON_LM to the clone"
        )
    try:
        tree = Tree.extract(Path(clone), OLD, TAGS[OLD], root / "old")
        # Compile the dataset helper before the tree is copied, so that no job compiles it.
        compiling = ["make", "-C", str(tree.root / "megatron/core/datasets")]
        subprocess.run(compiling, env=tree.environment(root), check=True, capture_output=True)
        site = real_dlrover.install(site_parent)
    except subprocess.CalledProcessError as error:
        printed = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr
        last = printed.strip().splitlines()[-1:] if printed else []
        command = " ".join(map(str, error.cmd[:4]))
        raise UnavailableError(": ".join([f"'{command} ...' failed", *last])) from error
    except OSError as error:
        raise UnavailableError(str(error)) from error
    trees = {"old": tree, "dlrover": real_dlrover.swapped(tree, root / "dlrover")}
    flags = _flags(size, distributed=distributed)
    return {name: _of_tree(copy, root, site, flags) for name, copy in trees.items()}


def _of_tree(tree: Tree, root: Path, site: Path, flags: tuple[str, ...]) -> Megatron:
    env = tree.environment(root)
    kept = {name: value for name, value in env.items() if not name.startswith("FLASHCKPT")}
    return Megatron(
        script=tree.root / "pretrain_gpt.py",
        flags=flags,
        env={**kept, "PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{site}"},
        cwd=tree.root,
    )
