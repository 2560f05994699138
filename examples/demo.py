"""Demonstrate what a crash costs with megatron_flashckpt.

Megatron's own loop trains a small GPT on CPU ranks (on GPUs if there are any), three times from the
same seed. The first job runs to its end. The second job is killed with SIGKILL and restarts from
the agent's memory. The third job is killed, and its agent once the checkpoint is in storage, from
which the job restarts. All losses after a restart must equal those of the first job. Training draws
dropout masks, so a lost random state would change the losses.

With `--store s3` the checkpoints go to a bucket of SeaweedFS, a real S3 server on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from megatron_flashckpt.catalog.listing import committed_iterations
from megatron_flashckpt.storage.opening import open_store
from tests.support.object_server import BUCKET, reachable_s3_server

REPO = Path(__file__).resolve().parents[1]
ITERATIONS, INTERVAL, KILLED_AT = 12, 4, 7
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--min-lr 1e-4 --lr-decay-iters 100 --lr-warmup-iters 2 --weight-decay 0.01 --clip-grad 1.0 "
    "--bf16 --use-distributed-optimizer --swiglu --vocab-size 8000 "
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--attention-backend unfused --log-interval 1 --eval-interval 1000 --eval-iters 0"
).split()
console = Console()


class Job:
    """Training job in its own directory; `run` starts or restarts it."""

    def __init__(self, where: Path, name: str, store: str) -> None:
        self.where = where
        self.name = name
        self.save = str(where / name / "checkpoints")
        if store == "s3":
            self.save = f"s3://{BUCKET}/{name.replace(' ', '-')}"
        self.starts = 0
        self.log = ""
        (where / name).mkdir()

    def run(self, *, kill_at: int | None = None, kill_agent: bool = False) -> None:
        """Train to the end, or kill the job when it has logged iteration `kill_at`.

        Args:
            kill_agent: then wait for the first commit, and kill the agent, too.
        """
        self.starts += 1
        begun = len(self.log)
        losses = self.where / self.name / f"losses-{self.starts}"
        process = subprocess.Popen(
            self._command(),
            env=self._environment(losses),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        with console.status(f"{self.name}: starting") as status:
            for line in process.stdout:
                self.log += line
                match = re.search(r" iteration +(\d+)/", line)
                if match:
                    status.update(f"{self.name}: iteration {match[1]} of {ITERATIONS}")
                    if int(match[1]) == kill_at:
                        kill(process.pid)
        process.wait()
        log = self.where / self.name / f"log-{self.starts}"
        log.write_text(self.log[begun:])
        if kill_at is None and process.returncode != 0:
            raise SystemExit(f"demo: {self.name} ended with {process.returncode}; see {log}")
        if kill_agent:
            deadline = time.monotonic() + 60
            while not committed_iterations(open_store(self.save)) and time.monotonic() < deadline:
                time.sleep(0.1)
            for agent in agents(self.where):
                kill(agent)

    def losses(self, start: int) -> dict[str, list[list[str]]]:
        """Return the exact losses of one start by rank: `[iteration, hexadecimal float]`."""
        files = sorted((self.where / self.name).glob(f"losses-{start}.*"))
        return {f.suffix: [line.split() for line in f.read_text().splitlines()] for f in files}

    def matches(self, pattern: str) -> list[str]:
        """Return all matches of `pattern` in the log."""
        return re.findall(pattern, self.log)

    def _command(self) -> list[str]:
        ranks = min(4, torch.cuda.device_count()) if torch.cuda.is_available() else 4
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "megatron_flashckpt.launch"),
            *(str(REPO / "scripts/pretrain_gpt_tiny.py"), *MODEL),
            *("--tensor-model-parallel-size", str(min(2, ranks))),
            *("--train-iters", str(ITERATIONS), "--save-interval", str(INTERVAL)),
            *("--save", self.save, "--load", self.save),
        ]

    def _environment(self, losses: Path) -> dict[str, str]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": str(self.where),  # torchrun leaves a directory there
            "LOSS_LOG": str(losses),
            "FLASHCKPT_RUNTIME_DIR": str(self.where / "agents"),
        }
        if not torch.cuda.is_available():
            environment["PYTHONPATH"] = f"{REPO / 'tests/cpu_megatron'}{os.pathsep}{REPO}"
            environment["CPU_CUDA_STUBS"] = "triton apex"
        return environment


def kill(pid: int) -> None:
    """Kill a process and all its children with SIGKILL."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=10)


def agents(where: Path) -> list[int]:
    """Return the agents of this demo, which are not children of this process."""
    pids = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        if "megatron_flashckpt.agent" in command and any(str(where) in word for word in command):
            pids.append(process.info["pid"])
    return pids


def equal(whole: Job, resumed: Job) -> tuple[bool, int]:
    """Return whether all losses after the restart equal those of `whole`, and their number."""
    compared = 0
    for rank, losses in resumed.losses(resumed.starts).items():
        expected = [entry for entry in whole.losses(1)[rank] if int(entry[0]) > INTERVAL]
        if losses != expected:
            return False, compared
        compared += len(losses)
    return compared > 0, compared


def show(whole: Job, resumed: list[Job]) -> bool:
    saves = Table(title="Saves of the uninterrupted run (rank 0)")
    for column in ("iteration", "MiB per rank", "training blocked, ms", "durable after, s"):
        saves.add_column(column, justify="right")
    staged = whole.matches(r"iteration (\d+) staged, ([\d.]+) MiB on rank 0, blocked ([\d.]+) ms")
    durable = dict(whole.matches(r"iteration (\d+) durable after ([\d.]+) s"))
    for iteration, mib, blocked in staged:
        saves.add_row(iteration, mib, blocked, durable.get(iteration, "never"))
    restarts = Table(title=f"Killed with SIGKILL in iteration {KILLED_AT + 1}, started again")
    for column in ("killed", "restored from", "losses compared", "losses equal"):
        restarts.add_column(column, justify="right")
    good = len(durable) == ITERATIONS // INTERVAL
    for job in resumed:
        same, compared = equal(whole, job)
        good &= same
        source = job.matches(r"flashckpt: iteration (\d+) was restored from (\w+)")
        restarts.add_row(
            job.name,
            "; ".join(f"{where}, iteration {iteration}" for iteration, where in source),
            str(compared),
            "[green]yes[/]" if same else "[red]no[/]",
        )
    console.print(saves, restarts, sep="\n")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints and logs")
    parser.add_argument(
        "--store", choices=("files", "s3"), default="files", help="s3: a server that this starts"
    )
    arguments = parser.parse_args()
    keep, store = arguments.keep, arguments.store
    if store == "s3" and sys.version_info < (3, 11):
        parser.error("--store s3 needs Python 3.11: remove .venv, and set PYTHON=python3.11")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    where = Path(tempfile.mkdtemp(prefix="flashckpt-demo-"))
    server = contextlib.ExitStack()
    try:
        if store == "s3":
            server.enter_context(reachable_s3_server(where / "s3"))
        whole, trainers, node = (
            Job(where, name, store)
            for name in ("uninterrupted", "all trainers", "all trainers and the agent")
        )
        whole.run()
        for job in (trainers, node):
            job.run(kill_at=KILLED_AT, kill_agent=job is node)
            job.run()
        good = show(whole, [trainers, node])
    except SystemExit:  # its message names a log
        keep = True
        raise
    finally:
        for pid in [child.pid for child in psutil.Process().children()] + agents(where):
            kill(pid)
        server.close()
        if keep:
            console.print(f"kept: {where}")
        else:
            shutil.rmtree(where)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
