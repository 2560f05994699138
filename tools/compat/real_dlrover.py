"""Real DLRover in a Megatron-LM tree, whose two imports are swapped as DLRover's guide says.

DLRover is installed into a directory of its own, without Kubernetes and Ray, because nothing else
here needs it.
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

from tools.compat.tree import Run, Tree

VERSION = "0.6.1"
_ATTEMPTS = 4
_MODULE = "dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt"
_IMPORT = re.compile(
    r"^from (?:megatron|megatron\.training)?\.checkpointing import (save|load)_checkpoint$", re.M
)
#: Packages that DLRover's saver imports, and those that its Megatron needs to compile and to start.
#: grpc has wheels for every Python.
_REQUIRED = ("deprecated", "grpcio", "pybind11", "six")
#: Code at the end of the script that waits for the last save: DLRover's saver ends with the job,
#: even in the middle of a save. DLRover's own wait function needs an existing tracker.
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
    """Return the directory below `where` with DLRover; install DLRover there if it is missing.

    Raises:
        subprocess.CalledProcessError: pip cannot install DLRover here.
    """
    site = where / f"dlrover-{VERSION}"
    if not site.is_dir():
        fresh = where / f"dlrover-{uuid.uuid4().hex}"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        pip += ["--target", str(fresh)]
        for packages in (["--no-deps", f"dlrover=={VERSION}"], list(_REQUIRED)):
            subprocess.run([*pip, *packages], check=True, capture_output=True, text=True)
        fresh.rename(site)
    return site


def swapped(tree: Tree, root: Path) -> Tree:
    """Return a copy of `tree` at `root` that saves and loads with DLRover."""
    copy = tree.copy(root)
    for path in ("megatron/training.py", "megatron/training/training.py"):
        file = copy.root / path
        if file.is_file():
            file.write_text(_IMPORT.sub(rf"from {_MODULE} import \1_checkpoint", file.read_text()))
    script = copy.root / "pretrain_gpt.py"
    script.write_text(f"{script.read_text().rstrip()}\n{_WAIT}")
    return copy


def run(tree: Tree, site: Path, scratch: Path, job: Callable[[dict[str, str]], Run]) -> Run:
    """Run `job` in an environment of `tree` with DLRover; return its output.

    DLRover forks its saver from a rank that has threads. The saver sometimes hangs at its start;
    the job is then run again.
    """
    for _ in range(_ATTEMPTS):
        with _environment(tree, site, scratch) as env:
            result = job(env)
        if "Timed out waiting for socket server" not in result.log:
            break
    return result


@contextlib.contextmanager
def _environment(tree: Tree, site: Path, scratch: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of one job; remove the saver's shared memory and sockets afterwards."""
    job = f"flashckpt-{uuid.uuid4().hex[:12]}"
    path = tree.environment(scratch)["PYTHONPATH"]
    try:
        yield {"PYTHONPATH": f"{path}{os.pathsep}{site}", "TORCHELASTIC_RUN_ID": job}
    finally:
        for file in Path("/dev/shm").glob(f"{job}_*"):
            file.unlink(missing_ok=True)
        shutil.rmtree(Path("/tmp/ckpt_sock") / job, ignore_errors=True)
