"""Megatron-LM tree of a release, and runs of its own `pretrain_gpt.py` on CPU ranks."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
#: Mock data has tokens up to 4095. 4352 is the padded vocabulary size under both TP1 and TP2.
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --bf16 --lr 1e-3 "
    "--min-lr 1e-4 --lr-decay-iters 100 --lr-warmup-iters 2 --weight-decay 0.01 --clip-grad 1.0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 4300 --split 99,1,0 --num-workers 0 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0 --swiglu --no-bias-swiglu-fusion "
    "--untie-embeddings-and-output-weights --distributed-timeout-minutes 3"
).split()
_FIGURES = re.compile(
    r" iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ",
)


#: Time limit of a job, above the time of every job.
LIMIT_S = 600.0
#: Processes that the ranks are forked from, by the root of their tree.
_nurseries: dict[Path, subprocess.Popen[str]] = {}


def end_nurseries() -> None:
    """End the processes that ranks were forked from; each holds some 300 MB."""
    for nursery in _nurseries.values():
        nursery.communicate()
    _nurseries.clear()


@dataclasses.dataclass(frozen=True)
class Run:
    """Output of one job."""

    log: str
    place: Path

    @property
    def figures(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm by iteration, as printed last."""
        return {int(n): (float(loss), float(norm)) for n, loss, norm in _FIGURES.findall(self.log)}

    def reason(self, what: str) -> str:
        """Return `what` with the first error that the job printed, and the path of its log."""
        errors = re.findall(
            r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception): .*)$", self.log, re.M
        )
        return f"{what}{f' ({errors[0]})' if errors else ''}; log: {self.place}"


@dataclasses.dataclass(frozen=True)
class Tree:
    """Files of one release."""

    tag: str
    root: Path

    @classmethod
    def extract(cls, clone: Path, tag: str, revision: str, root: Path) -> Tree:
        """Extract a release from `clone` into `root`."""
        archive = subprocess.run(
            ["git", "archive", revision], cwd=clone, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(root, filter="data")
        return cls(tag, root)

    def copy(self, root: Path) -> Tree:
        """Copy the release to another directory."""
        shutil.copytree(self.root, root)
        return Tree(self.tag, root)

    def run(
        self,
        arguments: list[str],
        log: Path,
        entry_point: str,
        env: dict[str, str],
        restarts: int = 0,
        ranks: int = 4,
    ) -> Run:
        """Run one job to its end.

        Args:
            entry_point: `stock` runs the tree as it is; `launch` runs it through our launcher.
        """
        command = [
            *(["-m", "megatron_flashckpt.launch"] if entry_point == "launch" else []),
            *("pretrain_gpt.py", *MODEL, *arguments),
            *(["--no-rope-fusion", "--attention-backend", "unfused"] if self._is_modern() else []),
        ]
        log.unlink(missing_ok=True)
        job = {"command": command, "env": env, "log": str(log), "ranks": ranks}
        limits = {"max_restarts": restarts, "timeout_s": LIMIT_S}
        nursery = self._nursery(log.parent, env)
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(json.dumps({**job, **limits}) + "\n")
        nursery.stdin.flush()
        if not nursery.stdout.readline():
            raise OSError(f"{self.root}: cannot be imported; see {log.parent}/*-import.log")
        return Run(log.read_text(errors="replace"), log)

    def _nursery(self, where: Path, env: dict[str, str]) -> subprocess.Popen[str]:
        """Return the process that this tree's ranks are forked from (`release_ranks.py`).

        If the tree's imports are swapped, this process imports our package, which takes its
        settings from `env`.
        """
        if self.root not in _nurseries:
            script = REPO / "tools/compat/ranks/release_ranks.py"
            with open(where / f"{self.root.name}-import.log", "w") as log:
                _nurseries[self.root] = subprocess.Popen(
                    [sys.executable, str(script), "torch,numpy,megatron.training"],
                    cwd=self.root,
                    # The stand-in for CUDA is installed only if LOCAL_RANK is set.
                    env={**self.environment(where), **env, "LOCAL_RANK": "0"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        return _nurseries[self.root]

    def environment(self, scratch: Path) -> dict[str, str]:
        """Return the environment in which this release runs on a CPU."""
        early = not (self.root / "megatron/training").is_dir()
        stubs = ["triton", "apex", *([] if self._is_modern() else ["pkg_resources", "torchvision"])]
        return {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("FLASHCKPT")
            },
            "PATH": os.pathsep.join(
                [str(self._tools()), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            # The tree hides the installed Megatron. This repository comes first, because both have
            # a package `tests`.
            "PYTHONPATH": os.pathsep.join(map(str, [REPO / "tests/cpu_megatron", REPO, self.root])),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "CPU_CUDA_STUBS": " ".join([*stubs, *(["transformer_engine"] if early else [])]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TMPDIR": str(scratch),
        }

    def knows(self, argument: str) -> bool:
        """Return whether this release has an argument; some arguments are fields of dataclasses."""
        places = [*self.root.glob("megatron/**/arguments.py"), *self._configurations()]
        written = re.compile(rf"(?<![\w-])(?:--)?{argument.replace('_', '[-_]')}(?![\w-])")
        return any(written.search(place.read_text()) for place in places)

    def _configurations(self) -> list[Path]:
        return list(self.root.glob("megatron/training/config/*.py"))

    def _is_modern(self) -> bool:
        return "attention-backend" in self._text("megatron/training/arguments.py")

    def _tools(self) -> Path:
        """Return a directory with a `python3-config` of this Python, for the dataset helper."""
        tools = self.root / ".tools"
        tools.mkdir(exist_ok=True)
        config = tools / "python3-config"
        config.write_text(f"#!/bin/sh\necho {sysconfig.get_config_var('EXT_SUFFIX')}\n")
        config.chmod(0o755)
        return tools

    def _text(self, path: str) -> str:
        file = self.root / path
        return file.read_text() if file.is_file() else ""
