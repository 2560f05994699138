"""The checkpoint systems of `python -m benchmarks train`, and the Megatrons they run in."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.train.job import Megatron, kept_environment
from patches.patch import TAGS
from tests.compat import real_dlrover
from tests.compat.tree import Tree

REPO = Path(__file__).resolve().parents[2]
#: The Megatron that DLRover's documentation uses, with its legacy GPT.
OLD = "cb995d5"

_COMMON = (
    "--micro-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 1000 --lr-warmup-iters 2 "
    "--weight-decay 0.01 --clip-grad 1.0 --bf16 --vocab-size 8000 "
    "--tokenizer-type NullTokenizer --mock-data --split 99,1,0 --num-workers 0 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --log-interval 1 --eval-interval 100000 --eval-iters 0 "
    "--distributed-timeout-minutes 3"
).split()
#: 29.3 million parameters: 0.41 GB of weights, masters and moments.
_USUAL_MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --global-batch-size 8"
).split()
_QUICK_MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --global-batch-size 4"
).split()
#: What cb995d5 does not know.
_NEWER = ("--no-rope-fusion", "--attention-backend", "unfused")


class UnavailableError(Exception):
    """A system cannot run here; says what is missing."""


@dataclasses.dataclass(frozen=True)
class System:
    """One way of saving checkpoints, or training without."""

    name: str
    label: str
    flags: tuple[str, ...] = ()
    runner: tuple[str, ...] = (sys.executable,)
    megatron: str = "installed"
    saves: bool = True
    from_memory: bool = False
    """Restarts from memory after its ranks were killed."""
    baseline: str = "none"
    """The run without saves that its figures are compared with."""
    leaves_out_saves: bool = False
    """Leaves out a save while the one before is being written."""
    hangs_with: str | None = None
    """What a run prints that may be tried once more."""


_TORCH_DIST = ("--ckpt-format", "torch_dist", "--ckpt-assume-constant-structure")
#: Without the last two flags Megatron 0.17.1 switches asynchronous saves off, or wants a package
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
        # It forks its saver from a rank with threads; now and then the saver hangs at its start.
        hangs_with="Timed out waiting for socket server",
    ),
)


def _flags(*, quick: bool, distributed: bool) -> tuple[str, ...]:
    model = _QUICK_MODEL if quick else _USUAL_MODEL
    return (*_COMMON, *model, *(("--use-distributed-optimizer",) if distributed else ()))


def installed(*, quick: bool, distributed: bool = True) -> Megatron:
    """Return the Megatron of this environment, on CPU ranks."""
    path = [str(REPO / "tests/cpu_megatron"), str(REPO)]
    return Megatron(
        script=REPO / "scripts/pretrain_gpt_tiny.py",
        flags=(*_flags(quick=quick, distributed=distributed), *_NEWER),
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
    root: Path, site_parent: Path, *, quick: bool, distributed: bool = True
) -> dict[str, Megatron]:
    """Return Megatron cb995d5 as it is (`old`) and with DLRover's save and load (`dlrover`).

    Args:
        site_parent: where DLRover is installed, unless it is there.

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
        # Both copies have the dataset helper that the first job would compile.
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
    flags = _flags(quick=quick, distributed=distributed)
    return {name: _of_tree(each, root, site, flags) for name, each in trees.items()}


def _of_tree(tree: Tree, root: Path, site: Path, flags: tuple[str, ...]) -> Megatron:
    env = tree.environment(root)
    kept = {name: value for name, value in env.items() if not name.startswith("FLASHCKPT")}
    return Megatron(
        script=tree.root / "pretrain_gpt.py",
        flags=flags,
        env={**kept, "PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{site}"},
        cwd=tree.root,
    )
