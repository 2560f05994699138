"""Gloo ranks that read a made checkpoint together; run by torchrun from the tests.

`CASES` is a JSON file with a list of `{"name", "mode", "wanted"?, "slow_read_s"?, "slow_send_s"?}`:
in each case all ranks are replicas that read all pieces of the checkpoint in `ROOT` (or only the
pieces that `wanted` lists for the rank). What each did goes to `TRACE_DIR/rank_<r>.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flashckpt.layout.coverage import read_plan
from megatron_flashckpt.layout.plan import pieces_of
from megatron_flashckpt.restore import replicas
from megatron_flashckpt.restore.checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.restore.reader import ChunkReader, chunk_reads
from megatron_flashckpt.restore.targets import Targets
from megatron_flashckpt.storage.posix import PosixStorage

RANK = int(os.environ["RANK"])
transfer = replicas.transfer


class SlowStorage(PosixStorage):
    """A disk that takes `delay_s` for every chunk."""

    delay_s = 0.0

    def read_into(self, *args: Any) -> int:
        time.sleep(self.delay_s)
        return super().read_into(*args)


def run(case: dict[str, Any]) -> None:
    storage = SlowStorage(os.environ["ROOT"])
    storage.delay_s = case.get("slow_read_s", 0.0)

    def slow_transfer(*args: Any, **kwargs: Any) -> None:
        time.sleep(case.get("slow_send_s", 0.0))
        transfer(*args, **kwargs)

    replicas.transfer = slow_transfer
    stored = StoredCheckpoint(storage, 10, read_manifest(storage, 10))
    pieces = [
        piece
        for source in stored.sources()
        for piece in pieces_of(source.template, source.placement)
    ]
    if "wanted" in case:
        pieces = [pieces[n] for n in case["wanted"][RANK]]
    tensors = [torch.zeros(piece.nbytes, dtype=torch.uint8) for piece in pieces]
    chunks = chunk_reads(read_plan(pieces, stored.sources(), "it"), pieces)
    event: dict[str, Any] = {"event": case["name"], "attempt": 0}
    memory = case.get("memory_mib", 96) * 2**20
    with ChunkReader(stored, 1) as reader:
        sharing = replicas.Sharing(None, case["mode"], memory)
        try:
            report = replicas.read_with_replicas(reader, chunks, Targets(pieces, tensors), sharing)
            event.update(report.__dict__)
        except Exception as error:
            event["error"] = f"{type(error).__name__}: {error}"
    event["digests"] = [hashlib.sha256(tensor.numpy().data).hexdigest() for tensor in tensors]
    with open(Path(os.environ["TRACE_DIR"]) / f"rank_{RANK}.jsonl", "a") as file:
        print(json.dumps(event), file=file)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for each in json.loads(Path(os.environ["CASES"]).read_text()):
        run(each)
        dist.barrier()
    dist.destroy_process_group()
