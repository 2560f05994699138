"""Rule: random numbers after a load equal those without a load, in captured steps, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tools.gpu_check import machine
from tools.gpu_check.report import Report

_NAMES = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")
_NUMEL = 1000


def run(report: Report) -> None:
    """Save, draw, load and draw again, with both kinds of Megatron's tracker."""
    with _generators():
        for graph_safe in (False, True):
            kind = "for CUDA graphs" if graph_safe else "of tensors"
            tracker = _tracker(graph_safe)
            _check(report, f"a tracker {kind} draws on after a load", lambda t=tracker: _drawn(t))
        if machine.simulated_node is not None:
            report.skip("a captured step draws on after a load", "needs a GPU")
            return
        draw = _captured(_tracker(True))
        _check(report, "a captured step draws on after a load", draw)


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    """Let Megatron use the GPU's generator; on the simulated node a CPU generator replaces it."""
    if machine.simulated_node is None:
        yield
        return
    from tests.simulated_gpu.generators import gpu_random

    with gpu_random():
        yield


def _tracker(graph_safe: bool) -> Any:
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(
        7,
        use_cudagraphable_rng=graph_safe,
        tp_rank=0,
        ep_rank=0,
        etp_rank=0,
        force_reset_rng=True,
    )
    return tensor_parallel.get_cuda_rng_tracker()


def _check(report: Report, what: str, draw: Callable[[], torch.Tensor]) -> None:
    from megatron_flashckpt.megatron_lm import side_state, side_state_codec

    draw()
    encoded = side_state_codec.encode(side_state.rng_state())
    expected = [draw(), draw()]
    side_state.load_rng_state(side_state_codec.decode(encoded, "the checkpoint"))
    again = [draw(), draw()]
    same = all(map(torch.equal, expected, again))
    fresh = not torch.equal(*expected)
    report.must(what, same and fresh, "" if fresh else "two draws are equal")


def _drawn(tracker: Any) -> torch.Tensor:
    """Return the next numbers of the default generator and of the tracker's generators."""
    device = machine.pick("cuda", "cpu")
    numbers = [torch.rand(_NUMEL, device=device)]
    for name in _NAMES:
        with tracker.fork(name):
            numbers.append(torch.rand(_NUMEL, device=device))
    return torch.stack(numbers).cpu()


def _captured(tracker: Any) -> Callable[[], torch.Tensor]:
    graph, drawn = torch.cuda.CUDAGraph(), torch.empty(len(_NAMES) + 1, _NUMEL, device="cuda")
    for generator in tracker.get_states().values():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        drawn[0].uniform_()
        for row, name in enumerate(_NAMES, start=1):
            with tracker.fork(name):
                drawn[row].uniform_()

    def draw() -> torch.Tensor:
        graph.replay()
        return drawn.cpu()

    return draw
