"""Real DLRover on a Megatron-LM tree: its two imports swapped, as its own guide does it.

DLRover is not needed for anything else, so it is installed into a directory of its own, without
what it requires of Kubernetes and Ray.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.compat.tree import Run, Tree

VERSION = "0.6.1"
_ATTEMPTS = 4
_MODULE = "dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt"
_IMPORT = re.compile(
    r"^from (?:megatron|megatron\.training)?\.checkpointing import (save|load)_checkpoint$", re.M
)
#: What its saver imports; grpc comes with wheels for every Python.
_REQUIRED = ("deprecated", "grpcio")
#: A job that ends at once takes its saver along, in the middle of the last save. What DLRover has
#: for it wants to be called when there is a tracker.
_WAIT = f"""
    import os, time
    from {_MODULE} import wait_latest_checkpoint
    deadline = time.monotonic() + 120
    while not os.path.exists(os.path.join(get_args().save, "dlrover_latest.txt")):
        assert time.monotonic() < deadline, "DLRover has committed nothing"
        time.sleep(0.1)
    wait_latest_checkpoint(timeout=120)
"""


def install(where: Path) -> Path:
    """Return the directory, below `where`, with DLRover; it is installed there once.

    Raises:
        subprocess.CalledProcessError: it cannot be had here.
    """
    site = where / f"dlrover-{VERSION}"
    if not site.is_dir():
        fresh = where / f"dlrover-{uuid.uuid4().hex}"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        pip += ["--target", str(fresh)]
        for wanted in (["--no-deps", f"dlrover=={VERSION}"], list(_REQUIRED)):
            subprocess.run([*pip, *wanted], check=True, capture_output=True, text=True)
        fresh.rename(site)
    return site


def swapped(tree: Tree, root: Path) -> Tree:
    """Return a copy of `tree` at `root` whose saves and loads are DLRover's."""
    copy = tree.copy(root)
    for path in ("megatron/training.py", "megatron/training/training.py"):
        file = copy.root / path
        if file.is_file():
            file.write_text(_IMPORT.sub(rf"from {_MODULE} import \1_checkpoint", file.read_text()))
    script = copy.root / "pretrain_gpt.py"
    script.write_text(f"{script.read_text().rstrip()}\n{_WAIT}")
    return copy


def run(tree: Tree, site: Path, scratch: Path, job: Callable[[dict[str, str]], Run]) -> Run:
    """Return what `job` printed, in an environment of `tree` with DLRover.

    DLRover forks its saver from a rank that has threads; now and then the saver hangs at its start.
    """
    for _ in range(_ATTEMPTS):
        with _environment(tree, site, scratch) as env:
            result = job(env)
        if "Timed out waiting for socket server" not in result.log:
            break
    return result


@contextlib.contextmanager
def _environment(tree: Tree, site: Path, scratch: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of one job; afterwards nothing of its saver is left in memory."""
    job = f"flashckpt-{uuid.uuid4().hex[:12]}"
    path = tree.environment(scratch)["PYTHONPATH"]
    try:
        yield {"PYTHONPATH": f"{path}{os.pathsep}{site}", "TORCHELASTIC_RUN_ID": job}
    finally:
        for file in Path("/dev/shm").glob(f"{job}_*"):
            file.unlink(missing_ok=True)
        shutil.rmtree(Path("/tmp/ckpt_sock") / job, ignore_errors=True)
