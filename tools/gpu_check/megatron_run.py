"""Process of real Megatron under a schedule (`megatron_job.py`), and the files that it writes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.forked.job import free_port
from tools.gpu_check import machine
from tools.gpu_check.forkserver import ROOT, Process
from tools.gpu_check.report import Report

_SCRIPT = ROOT / "tools/gpu_check/megatron_job.py"
#: Arguments of every job, here and in `benchmarks.train`.
COMMON = (
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-iters 1000 --lr-warmup-iters 2 "
    "--weight-decay 0.01 --clip-grad 1.0 --bf16 --vocab-size 8000 "
    "--tokenizer-type NullTokenizer --mock-data --split 99,1,0 --num-workers 0 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --log-interval 1 --eval-interval 100000 --eval-iters 0 "
    "--distributed-timeout-minutes 3"
).split()
#: Arguments that old releases do not have.
NEWER = ("--no-rope-fusion", "--attention-backend", "unfused")
ON_GPU = (
    *(*COMMON, *NEWER, "--use-distributed-optimizer", "--swiglu", "--deterministic-mode"),
    *("--lr", "1e-4", "--min-lr", "1e-5"),
)
_SHAPE = (
    "--num-layers 20 --seq-length 1024 --max-position-embeddings 1024 --num-attention-heads 16 "
)
#: Arguments of models by their size; the batches are missing.
MODELS = {
    "0.4b": _SHAPE + "--hidden-size 1280 --ffn-hidden-size 3456 --vocab-size 32000",
    "1.3b": _SHAPE + "--hidden-size 2048 --ffn-hidden-size 5632 --vocab-size 128000",
}
#: Variables of the only rank, which needs no torchrun, whose start takes seconds.
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # --deterministic-mode requires these settings.
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # A machine without a network may not resolve its own name.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


class Run:
    """Job of one rank. It ends by its own SIGKILL before the iteration `kill` of its schedule."""

    def __init__(
        self,
        where: Path,
        name: str,
        size: str,
        *,
        kill: int,
        saves: dict[int, str] | None = None,
        variants: dict[int, str] | None = None,
        digests: tuple[int, ...] = (),
        ours: bool = True,
        **environment: str,
    ) -> None:
        """Describe the job.

        Args:
            where: directory of the files and, under `ours`, of the checkpoints.
            size: arguments of the model's size and batch.
            saves, variants, digests, kill: see `megatron_job.py`.
            ours: False: Megatron's own training, without the package and without saves.
            environment: additional variables.
        """
        self.name = name
        self._where = where
        self._arguments = [*ON_GPU, "--train-iters", "1000", *size.split()]
        self._ours = ours
        self._schedule = {"saves": saves or {}, "variants": variants or {}}
        self._schedule |= {"digests": digests, "kill": kill}
        self._environment = environment
        self._trace, self._losses, self._log = (
            where / f"{name}.{kind}" for kind in ("trace", "losses", "log")
        )

    def run(self, report: Report) -> bool:
        """Run the job; report and return whether its own SIGKILL has ended it."""
        self._log.touch()
        module, arguments = "tools.gpu_check.megatron_job", self._arguments
        if self._ours:
            save = str(self._where / "checkpoints")
            module, arguments = "megatron_flashckpt.launch", [str(_SCRIPT), *arguments]
            # The schedule sets another interval before every iteration.
            arguments += ["--save", save, "--load", save, "--save-interval", "1000"]
        started = time.monotonic()
        process = Process(
            *(module, arguments, self._variables(), self._log),
            # The stand-ins for CUDA on a CPU rank have to come before the import of torch.
            fresh=machine.simulated_node is not None,
        )
        status = process.wait(machine.seconds_left())
        process.kill()
        is_killed = status == -signal.SIGKILL and bool(self.events("killed"))
        # On a CPU rank a fault kills the job in the middle of its copies.
        is_killed |= status == -signal.SIGKILL and "FLASHCKPT_FAULT" in self._environment
        report.must(
            f"the job '{self.name}' trains as far as its schedule says",
            is_killed,
            "" if is_killed else f"status {status}: {self.log_end()}",
        )
        report.figure(f"the job '{self.name}' takes", time.monotonic() - started, "s")
        return is_killed

    def _variables(self) -> dict[str, str]:
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        if machine.simulated_node is not None:  # never with a GPU: it turns "cuda" into the CPU
            path.insert(0, str(ROOT / "tests/cpu_megatron"))
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            **ONE_RANK,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "CPU_CUDA_STUBS": "triton",
            "SCHEDULE": json.dumps(self._schedule),
            "TRACE": str(self._trace),
            "LOSS_LOG": str(self._losses),
            "FLASHCKPT_RUNTIME_DIR": str(self._where / "run"),
            "FLASHCKPT_AGENT__GRACE_S": "600",  # a busy machine takes minutes to start a job
            "FLASHCKPT_AGENT__KEEP_UNWRITTEN_S": "0",  # no agent outlives its test
            **self._environment,
        }

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def log_end(self) -> str:
        return self.log()[-1500:]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self._trace.read_text().splitlines() if self._trace.exists() else []
        events = [json.loads(line) for line in lines]
        return [event for event in events if event["event"] == name]

    def steps(self) -> dict[int, float]:
        """Return the seconds of every iteration, with the save that follows it."""
        begins = {event["iteration"]: event for event in self.events("begin")}
        return {
            n: begins[n + 1]["entered"] - begin["time"]
            for n, begin in begins.items()
            if n + 1 in begins
        }

    def digests(self, iteration: int) -> dict[str, int]:
        """Return the digests of all tensors after `iteration`; empty if it was not reached."""
        for event in self.events("digests"):
            if event["iteration"] == iteration:
                return dict(event["digests"])
        return {}

    def losses(self, first: int, last: int) -> list[str]:
        """Return iteration and exact loss of every micro-batch of these iterations."""
        path = Path(f"{self._losses}.0")
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if first <= int(line.split()[0]) <= last]
