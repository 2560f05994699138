"""Checkpoint systems of `python -m benchmarks train`, and the Megatrons that they run in."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.driver import environment
from benchmarks.train.job import Megatron
from benchmarks.train.sizes import SIZES, Size
from benchmarks.train.starts import forked
from patches.patch import TAGS
from tests.support.forked.nursery import REPO
from tools.compat import real_dlrover
from tools.compat.tree import Tree
from tools.gpu_check.forkserver import ENVIRONMENT
from tools.gpu_check.megatron_run import COMMON, NEWER, ON_GPU, ONE_RANK

#: Megatron commit that DLRover's documentation uses, with its legacy GPT.
OLD = "cb995d5"


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
    package: str | None = None
    """Module that the system needs in addition to Megatron."""
    flag: str | None = None
    """Flag of the system that not all releases of Megatron have."""


_TORCH_DIST = ("--ckpt-format", "torch_dist", "--ckpt-assume-constant-structure")
#: Without the persistent worker Megatron 0.17.1 switches asynchronous saves off.
_ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy")
#: Saves through shared memory, instead of through handles of the GPU's memory.
_SHM = "--async-ckpt-use-cpu-shm"

SYSTEMS: tuple[System, ...] = (
    System("none", "no saves", saves=False),
    System(
        "flashckpt",
        "megatron_flashckpt",
        runner=(sys.executable, "-m", "megatron_flashckpt.launch"),
        from_memory=True,
    ),
    System(
        "torch_dist-nvrx",
        "Megatron torch_dist, async (nvrx)",
        (*_TORCH_DIST, *_ASYNC, "nvrx"),
        package="nvidia_resiliency_ext",
    ),
    System(
        "torch_dist-async",
        "Megatron torch_dist, async (mcore)",
        (*_TORCH_DIST, *_ASYNC, "mcore"),
    ),
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


#: Systems that only a GPU's study has.
GPU_ONLY = (
    System(
        "torch_dist-nvrx-shm",
        "Megatron torch_dist, async (nvrx, shared memory)",
        (*_TORCH_DIST, *_ASYNC, "nvrx", _SHM),
        package="nvidia_resiliency_ext",
        flag=_SHM,
    ),
)


def chosen(systems: Sequence[System], names: Sequence[str] | None) -> list[System]:
    """Return the systems with these names (None: all), and their runs without saves."""
    wanted = [system for system in systems if names is None or system.name in names]
    baselines = {system.baseline for system in wanted}
    return [system for system in systems if system in wanted or system.name in baselines]


def available(systems: Sequence[System]) -> tuple[list[System], dict[str, str]]:
    """Return the systems whose package and flag are there; the reasons of the others by label."""
    lacking = {system.label: reason for system in systems if (reason := _lacking(system))}
    return [system for system in systems if system.label not in lacking], lacking


def _lacking(system: System) -> str | None:
    if system.package and importlib.util.find_spec(system.package) is None:
        return f"{system.package} is not installed"
    if system.flag and not _is_known(system.flag):
        return f"the installed Megatron has no {system.flag}"
    return None


def _is_known(flag: str) -> bool:
    """Return whether the installed Megatron has a flag, which it may derive from a field's name."""
    spec = importlib.util.find_spec("megatron.training")
    spelled = (flag, f"    {flag[2:].replace('-', '_')}:")
    texts = (
        file.read_text()
        for directory in (spec and spec.submodule_search_locations) or ()
        for file in Path(directory).rglob("*.py")
    )
    return any(name in text for text in texts for name in spelled)


def _flags(size: str, *, distributed: bool) -> tuple[str, ...]:
    optimizer = ("--use-distributed-optimizer",) if distributed else ()
    return (*COMMON, *SIZES[size].model, *optimizer)


def installed(size: str, *, distributed: bool = True) -> Megatron:
    """Return the Megatron of this environment, on CPU ranks."""
    return Megatron(
        script=REPO / "scripts/pretrain_gpt_tiny.py",
        flags=(*_flags(size, distributed=distributed), *NEWER),
        env=environment(on_cpu=True),
        cwd=REPO,
    )


def on_gpu(size: Size, *, on_cpu: bool) -> Megatron:
    """Return the Megatron of this environment with one forked rank.

    Args:
        on_cpu: the rank runs on a CPU, to test the study.
    """
    return Megatron(
        script=REPO / "scripts/pretrain_gpt_tiny.py",
        flags=(*ON_GPU, *size.model),
        env=environment_of_one_rank(on_cpu=on_cpu),
        cwd=REPO,
        ranks=1,
        start=forked,
    )


def environment_of_one_rank(*, on_cpu: bool) -> dict[str, str]:
    """Return the environment of the one rank, and of the process that forks it."""
    return {**environment(on_cpu=on_cpu), **ENVIRONMENT, **ONE_RANK}


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
        site = real_dlrover.install(site_parent)
        # Compile the dataset helper before the tree is copied, so that no job compiles it.
        compiling = ["make", "-C", str(tree.root / "megatron/core/datasets")]
        env = _with_packages(tree, root, site)
        subprocess.run(compiling, env=env, check=True, capture_output=True)
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
    return Megatron(
        script=tree.root / "pretrain_gpt.py",
        flags=flags,
        env=_with_packages(tree, root, site),
        cwd=tree.root,
    )


def _with_packages(tree: Tree, root: Path, site: Path) -> dict[str, str]:
    env = tree.environment(root)
    return {**env, "PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{site}"}
