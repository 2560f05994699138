"""Run a real Megatron training job on CPU ranks and read what it traced."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from megatron_flashckpt import arguments
from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.layout.copies import split
from megatron_flashckpt.layout.template import pieces_of
from megatron_flashckpt.megatron_lm import side_state_codec
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.forked.job import free_port, run_forked
from tests.support.forked.nursery import REPO, job_environment
from tests.support.processes import end
from tests.support.trainer import copy_tree, eventually

JOB = REPO / "tests/support/jobs/traced_gpt.py"
MANY_LOADS = REPO / "tests/support/jobs/many_loads.py"

TINY = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 100 "
    "--lr-warmup-iters 2 --weight-decay 0.01 --clip-grad 1.0 --vocab-size 500 "
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--attention-backend unfused --log-interval 1 --eval-interval 1000 --eval-iters 0"
).split()

#: Flags that give param groups rates of their own; Megatron 0.17.1 has no other mark of them.
DECOUPLED = ["--decoupled-lr", "5e-3", "--decoupled-min-lr", "5e-4"]
#: The same for matrices that are neither embedding nor output.
MUP = ["--use-mup", "--mup-base-hidden-size", "16"]
#: Environment in which a stock job can load such groups. 0.17.1 identifies groups by four marks and
#: gives groups with equal marks the settings of the last one, or refuses them; 0.19 has more marks.
GROUP_MARKS = {"GROUP_MARKS": "1"}


def await_no_agent(where: Path) -> None:
    """Wait until the agents of jobs in `where` have ended and removed their files.

    An agent receives a report that its job has ended and ends a moment later, long before the grace
    time of an agent without that report.
    """
    run = where / "run"
    eventually("the end of the agent", lambda: not list(run.iterdir()), within_s=60.0)


@dataclasses.dataclass
class Result:
    """Output and trace of a job."""

    returncode: int
    log: str
    events: list[dict]

    def losses(self, attempt: int = 0) -> dict[int, list[tuple[int, str]]]:
        """Return exact micro-batch losses by iteration: `(rank, hexadecimal float)` in order."""
        by_iteration: dict[int, list[tuple[int, str]]] = {}
        for event in self.events:
            if event["event"] == "loss" and event["attempt"] == attempt:
                by_iteration.setdefault(event["iteration"], []).append(
                    (event["rank"], event["value"])
                )
        return by_iteration

    def named(self, name: str, attempt: int | None = None) -> list[dict]:
        return [
            event
            for event in self.events
            if event["event"] == name and attempt in (None, event["attempt"])
        ]


def run_job(
    tmp_path: Path,
    name: str,
    arguments: list[str],
    *,
    ranks: int = 4,
    nodes: int = 1,
    order: Sequence[int] | None = None,
    entry_point: str = "launch",
    max_restarts: int = 0,
    env: dict[str, str] | None = None,
    timeout_s: float = 240,
    script: Path = JOB,
    torchrun: bool = False,
) -> Result:
    """Run one job to its end.

    Args:
        ranks: over all nodes.
        order: numbers of the nodes in rank order; a changed order swaps nodes.
        entry_point: `launch` (the launcher, script unedited), `swap` (Megatron's training.py with
            the imports swapped by our patch), or `stock` (Megatron alone).
        torchrun: have torchrun start the ranks. Otherwise a process that has imported the installed
            packages forks them, which rules out another Megatron and tests of torchrun itself.
    """
    trace = tmp_path / f"trace-{name}"
    trace.mkdir()
    first = [patched_megatron(tmp_path)] if entry_point == "swap" else []
    runner = ["-m", "megatron_flashckpt.launch"] if entry_point == "launch" else []
    environment = {
        **job_environment(tmp_path, *first),
        # torch 2.13 gives a restarted attempt the store of the failed one, in which gloo then finds
        # the addresses of dead ranks. This package is not involved.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TRACE_DIR": str(trace),
        "TMPDIR": str(trace),  # torchrun leaves a directory there
        **(env or {}),
    }
    command = [*runner, str(script), *TINY, *arguments]
    logs = [tmp_path / f"log-{name}-{node}" for node in range(nodes)]
    places = [environment]
    if nodes > 1:
        # Each "node" of this one machine has its own agent.
        runs = [str(tmp_path / f"run/{node}") for node in order or range(nodes)]
        places = [{**environment, "FLASHCKPT_RUNTIME_DIR": run} for run in runs]
    if torchrun or entry_point == "swap":
        status = _torchrun(command, name, ranks, places, logs, max_restarts, timeout_s)
    else:
        logs = logs[:1]
        status = run_forked(
            command,
            places,
            ranks,
            cwd=tmp_path,
            log=logs[0],
            max_restarts=max_restarts,
            timeout_s=timeout_s,
        )
    log = "".join(file.read_text(errors="replace") for file in logs)
    events = []
    for file in sorted(trace.glob("rank_*.jsonl")):
        rank = int(file.stem.split("_")[1])
        events += [{"rank": rank, **json.loads(line)} for line in file.read_text().splitlines()]
    return Result(status, log, events)


def run_cases(
    where: Path, name: str, arguments: list[str], cases: list[dict], *, ranks: int, **options: int
) -> Result:
    """Run the cases of `jobs/many_loads.py`, loads and saves, one after the other in one job."""
    file = where / f"cases-{name}.json"
    file.write_text(json.dumps(cases))
    job = {"entry_point": "stock", "script": MANY_LOADS, "env": {"CASES": str(file)}}
    return succeeded(run_job(where, name, arguments, ranks=ranks, **job, **options))


def _torchrun(
    command: list[str],
    name: str,
    ranks: int,
    places: list[dict[str, str]],
    logs: list[Path],
    max_restarts: int,
    timeout_s: float,
) -> int:
    """Run a job on nodes with these environments; `logs` lie in the job's directory."""
    nodes, where, port = len(logs), logs[0].parent, free_port()
    processes = []
    for node, (environment, log) in enumerate(zip(places, logs, strict=True)):
        rendezvous = ["--standalone"]
        if nodes > 1:
            rendezvous = [
                *("--nnodes", str(nodes), "--node-rank", str(node), "--rdzv-id", name),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
            ]
        started = [
            *(sys.executable, "-m", "torch.distributed.run", *rendezvous),
            *("--nproc-per-node", str(ranks // nodes), "--max-restarts", str(max_restarts)),
            *command,
        ]
        with open(log, "w") as output:
            processes.append(
                subprocess.Popen(started, env=environment, cwd=where, stdout=output, stderr=output)
            )
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.wait(deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{name} did not end in {timeout_s} s, see {logs}") from None
    finally:
        for process in processes:
            end(process)
    return max(process.returncode for process in processes)


def succeeded(result: Result) -> Result:
    assert result.returncode == 0, result.log[-6000:]
    return result


def patched_megatron(tmp_path: Path) -> Path:
    """Return a directory whose `megatron.training` is the installed one, patched by our patch."""
    import megatron.core

    overlay = tmp_path / "patched"
    if not overlay.exists():
        installed = Path(megatron.core.__file__).parents[1] / "training"
        shutil.copytree(installed, overlay / "megatron/training")
        minor = megatron.core.__version__.rpartition(".")[0]
        (patch,) = REPO.glob(f"patches/core_v{minor}.*.patch")
        subprocess.run(
            ["git", "apply", "--unsafe-paths", f"--directory={overlay}", str(patch)],
            check=True,
            cwd=tmp_path,
        )
    return overlay


def truncated_copy(save: Path, copy: Path, iteration: int) -> Path:
    """Copy a save directory as it was when `iteration` was its newest checkpoint."""
    copy.mkdir()
    for directory in save.glob("iter_*"):
        if int(directory.name[5:]) <= iteration:
            copy_tree(directory, copy / directory.name)
    (copy / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return copy


def committed(save: Path) -> list[int]:
    """Return the iterations of the checkpoints in a save directory, in ascending order."""
    return [checkpoint.iteration for checkpoint in read_facts(PosixStore(save)).stored]


def tensors(save: Path, iteration: int) -> dict[tuple[int, str], torch.Tensor]:
    """Return a checkpoint's tensors by `(rank, name)`, read by the real safetensors library."""
    by_name = {}
    for file in sorted((save / f"iter_{iteration:07d}").glob("*.safetensors")):
        rank = int(file.name.split(".")[3].removeprefix("rank_"))
        for name, tensor in load_file(file).items():
            by_name[rank, name] = tensor
    assert by_name, f"no shard in {save} at iteration {iteration}"
    return by_name


def differing(
    one: dict[tuple[int, str], torch.Tensor], other: dict[tuple[int, str], torch.Tensor]
) -> list[tuple[int, str]]:
    """Return the names whose contents differ in any bit; both must hold the same names.

    The side state is a serialised object (RNG, param groups, ...). Its bytes depend on which
    objects happen to be shared, so its values are compared one by one.
    """
    assert one.keys() == other.keys()
    unequal = []
    for name, tensor in one.items():
        if name[1].startswith("rank_state/"):
            equal = same(side_state(tensor), side_state(other[name]))
        else:
            equal = torch.equal(tensor, other[name])
        if not equal:
            unequal.append(name)
    return unequal


def common_state(save: str, step: int | None) -> dict | None:
    """Return the state from which a job takes its arguments."""
    source = arguments._source(save, step)
    return None if source is None else source.state()


def side_state(tensor: torch.Tensor) -> dict:
    framed = tensor.numpy().tobytes()
    length = int.from_bytes(framed[:8], "little")
    return side_state_codec.decode(framed[8 : 8 + length], "the shard")


def same(one: object, other: object) -> bool:
    """Return True if two nests of dicts, sequences and arrays are equal, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return one == other


def assemble(save: Path, iteration: int) -> dict[tuple[str, str], torch.Tensor]:
    """Return the global tensors, assembled from pieces that cover each element exactly once."""
    wholes = _with_copies(save, iteration)
    return {name: whole for name, whole in wholes.items() if "@" not in name[0]}


def copies(save: Path, iteration: int) -> dict[tuple[str, str], torch.Tensor]:
    """Return all copies other than the main copies, as `assemble` does.

    The kind names the place of the copy. For example, "weight@0.1" is of tensor rank 1.
    """
    wholes = _with_copies(save, iteration)
    return {name: whole for name, whole in wholes.items() if "@" in name[0]}


def _with_copies(save: Path, iteration: int) -> dict[tuple[str, str], torch.Tensor]:
    stored = open_checkpoint(PosixStore(save), iteration)
    shards = tensors(save, iteration)
    wholes: dict[tuple[str, str], torch.Tensor] = {}
    filled: dict[tuple[str, str], torch.Tensor] = {}
    for source in stored.sources():
        # Pieces come in file order, which is the order of the layout.
        contents = [tensor for (rank, _), tensor in shards.items() if rank == source.rank]
        for piece, content in zip(
            pieces_of(source.template, source.placement), contents, strict=True
        ):
            if piece.kind == "rank_state":
                continue
            place, piece = split(piece)
            copy = "" if place is None else f"@{'.'.join(map(str, place.offset))}"
            name = (piece.kind + copy, piece.key)
            if name not in wholes:
                wholes[name] = torch.zeros(piece.global_shape, dtype=content.dtype)
                filled[name] = torch.zeros(piece.global_shape, dtype=torch.int8)
            whole, count = wholes[name], filled[name]
            box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
            flat = whole[box].reshape(-1).clone()
            flat[piece.start : piece.end] = content
            whole[box] = flat.view(piece.shape)
            times = count[box].reshape(-1).clone()
            times[piece.start : piece.end] += 1
            count[box] = times.view(piece.shape)
    assert all(bool((count == 1).all()) for count in filled.values())
    return wholes
