"""Collectives of the package over NCCL with one rank, and over gloo with two ranks on one GPU."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_flashckpt.collectives import gather_objects, reduce_int, run_on_rank_0
from megatron_flashckpt.load.all_to_all import Stream, transfer
from tools.gpu_check import machine
from tools.gpu_check.process import Child, wait
from tools.gpu_check.report import Report

_PATIENCE_S = 30.0


def run(report: Report) -> None:
    """Run the collectives over NCCL in this process, and over gloo in two others."""
    # A machine without a network may not resolve its own name.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    with tempfile.TemporaryDirectory(prefix="n-") as directory:
        where = Path(directory)
        ranks = [
            Child("tools.gpu_check.sections.nccl:run_gloo", where, {"RANK": str(rank)})
            for rank in range(2)
        ]
        _run_rank(report, machine.pick("nccl", "gloo"), where / "one", 0, 1)
        wait(ranks, _PATIENCE_S)
        for child in ranks:
            child.pass_on(report, figures=True)
            if child.status != 0:
                report.must("a gloo rank with a GPU ends well", False, child.output)


def run_gloo(report: Report) -> None:
    """Be one of two gloo ranks, as under `--distributed-backend gloo`.

    Each rank receives the data of the other rank directly into tensors on the GPU.
    """
    _run_rank(report, "gloo", Path(os.environ["WHERE"]) / "two", int(os.environ["RANK"]), 2)


def _run_rank(report: Report, backend: str, store: Path, rank: int, size: int) -> None:
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=30),
    )
    report_collectives(report, f"{size} {backend} ranks", machine.pick(256 << 20, 1 << 20))
    dist.barrier()
    dist.destroy_process_group()


def report_collectives(report: Report, name: str, nbytes: int) -> None:
    """Gather and broadcast small and large objects, reduce numbers, exchange `nbytes` per pair.

    Collective. Every rank knows the data of all other ranks and compares the data that it receives.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in (10, 1_000_000):  # in one collective, and in two
        gathered = gather_objects({"rank": rank, "bytes": bytes([rank]) * numel})
        right = [{"rank": other, "bytes": bytes([other]) * numel} for other in range(size)]
        report.must(f"{name}: objects of {numel} bytes are gathered", gathered == right)
        received_object = run_on_rank_0(lambda numel=numel: b"x" * numel)
        report.must(
            f"{name}: an object of {numel} bytes is broadcast", received_object == b"x" * numel
        )
    sums = (reduce_int(2**40 + rank, "sum"), reduce_int(rank, "max"))
    right_sums = (size * 2**40 + size * (size - 1) // 2, size - 1)
    report.must(f"{name}: numbers are reduced", sums == right_sums, f"{sums}")
    _report_exchange(report, name, nbytes)


def _report_exchange(report: Report, name: str, nbytes: int) -> None:
    """Send the whole buffer to every rank, into tensors on the GPU; to itself only over NCCL."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = _content(rank, nbytes)
    targets = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(size)]

    def take(peer: int, which: int, start: int, part: torch.Tensor) -> None:
        targets[peer][start : start + part.numel()].copy_(part)

    peers = [peer for peer in range(size) if peer != rank or dist.get_backend() == "nccl"]
    streams = {peer: Stream([(0, nbytes)]) for peer in peers}
    started = time.perf_counter()
    transfer(own, streams, streams, room=lambda: 64 << 20, take=take)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    received = len(peers) * nbytes / 1e9
    report.figure(f"{name}: exchange", received / seconds, "GB/s", "received per rank")
    unequal = [
        peer for peer in peers if not torch.equal(targets[peer].cpu(), _content(peer, nbytes))
    ]
    report.must(f"{name}: exchanged bytes are equal", not unequal, f"from ranks {unequal}")


def _content(rank: int, nbytes: int) -> torch.Tensor:
    """Return the bytes that a rank sends, without a period that is a power of two."""
    return (torch.arange(nbytes, dtype=torch.int64) % (251 - 2 * rank)).to(torch.uint8)
