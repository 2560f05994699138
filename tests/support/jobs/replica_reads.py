"""Gloo ranks that read a made checkpoint together; run by torchrun from the tests.

`CASES` is a JSON file with a list of cases: `{"name", "root", "mode", "wanted"?, "slow_read_s"?,
"slow_send_s"?, "first_send_s"?, "many"?, "gpu"?, "gpu_read_s"?, "gpu_send_s"?}`. In each case all
ranks are replicas that read all pieces of the checkpoint in `root` (or only the pieces that
`wanted` lists for the rank). Each rank's trace goes to `TRACE_DIR/rank_<r>.jsonl`.

`first_send_s` is the additional time of the first transfer, which NCCL also needs. `many` is the
number of replicas that always share. `memory_mib` may be a list with a number for each rank.

With `gpu`, `gpu_read_s` or `gpu_send_s` the tensors lie on a simulated GPU with the rank's number.
The last two are seconds that training's copies to the host, on a stream of their own, keep the GPU
busy for each chunk read, and for each transfer.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import pieces_of
from megatron_flashckpt.load import replica_sharing
from megatron_flashckpt.load.chunk_reader import ChunkReader, chunk_reads
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.simulated_gpu import simulated_gpus
from tests.support.checkpoints import SAVE_ID
from tests.support.jobs.traces import trace

RANK = int(os.environ["RANK"])
transfer = replica_sharing.transfer


class OffloadCopies:
    """Training's copies to the host, each of which keeps the GPU's engine busy for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        if seconds:
            self._stream = torch.cuda.Stream()
            self._source = torch.zeros(1024, dtype=torch.uint8, device="cuda")
            self._host = torch.empty(1024, dtype=torch.uint8, pin_memory=True)

    def ask(self) -> None:
        if self._seconds:
            with torch.cuda.stream(self._stream):
                self._host.copy_(self._source, non_blocking=True)


class SlowStore(PosixStore):
    """A disk that takes `delay_s` for every chunk; training offloads during that time."""

    delay_s = 0.0
    offload: OffloadCopies | None = None

    def get_into(self, *args: Any) -> int:
        time.sleep(self.delay_s)
        if self.offload is not None:
            self.offload.ask()
        return super().get_into(*args)


def run(case: dict[str, Any]) -> None:
    seconds = max(case.get("gpu_read_s", 0.0), case.get("gpu_send_s", 0.0))
    if not (seconds or "gpu" in case):
        note(*load(case, "cpu"))
        return
    rate = 1024 / seconds if seconds else 0.0
    # The tensors take 67 MiB.
    with simulated_gpus(RANK + 1, memory_nbytes=128 << 20) as node:
        torch.cuda.set_device(RANK)
        with mock.patch.object(node, "d2h_bytes_per_s", rate):
            tensors, event = load(case, "cuda")
        note(tensors, event)


def load(case: dict[str, Any], device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the filled tensors, and the traced facts of the load."""
    store = SlowStore(case["root"])
    store.delay_s = case.get("slow_read_s", 0.0)
    sending = OffloadCopies(case.get("gpu_send_s", 0.0))

    first_send_s = [case.get("first_send_s", 0.0)]

    def slow_transfer(*args: Any, **kwargs: Any) -> None:
        time.sleep(case.get("slow_send_s", 0.0))
        if first_send_s:
            time.sleep(first_send_s.pop())
        sending.ask()
        transfer(*args, **kwargs)

    save = Save(10, SAVE_ID)
    stored = StoredCheckpoint(store, save, read_manifest(store, save))
    pieces = [
        piece
        for source in stored.sources()
        for piece in pieces_of(source.template, source.placement)
    ]
    if "wanted" in case:
        pieces = [pieces[n] for n in case["wanted"][RANK]]
    store.offload = OffloadCopies(case.get("gpu_read_s", 0.0))
    tensors = [torch.zeros(piece.nbytes, dtype=torch.uint8, device=device) for piece in pieces]
    targets = Targets(pieces, tensors)
    chunks = chunk_reads(read_plan(pieces, stored.sources(), "it"), pieces)
    event: dict[str, Any] = {"event": case["name"]}
    memory = case.get("memory_mib", 96)
    memory = (memory[RANK] if isinstance(memory, list) else memory) * 2**20
    slow = mock.patch.object(replica_sharing, "transfer", slow_transfer)
    many = mock.patch.object(replica_sharing, "MANY_REPLICAS", case.get("many", 64))
    with slow, many, ChunkReader(stored, 1, targets.gpu) as reader:
        sharing = replica_sharing.ReplicaGroup(None, case["mode"], memory)
        try:
            report = replica_sharing.read_with_replicas(reader, chunks, targets, sharing)
            event.update(report.__dict__)
        except Exception as error:
            event["error"] = f"{type(error).__name__}: {error}"
    return tensors, event


def note(tensors: list[torch.Tensor], event: dict[str, Any]) -> None:
    digests = [hashlib.sha256(tensor.cpu().numpy().data).hexdigest() for tensor in tensors]
    trace(**event, digests=digests)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for entry in json.loads(Path(os.environ["CASES"]).read_text()):
        run(entry)
        dist.barrier()
    dist.destroy_process_group()
