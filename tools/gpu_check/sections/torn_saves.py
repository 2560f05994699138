"""Rule: every slot holds the tensors of one step, while training continues during the copies.

All elements of a tensor are equal and change in every step, so the smallest and the largest element
of a torn copy differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import Slot
from megatron_flashckpt.save.stager import Stager
from megatron_flashckpt.save.step_hook import StepHook
from tests.cpu_megatron.stubs.apex.apex.optimizers import FusedAdam
from tests.support.staging import TensorCopy, stage
from tools.gpu_check import machine
from tools.gpu_check.report import Report

#: Seconds before the driver's limit at which this section stops.
_LEAST_S = 5.0


class EagerTraining:
    """Model whose optimizer steps eagerly."""

    def __init__(self, make_optimizer: Callable[[list[torch.Tensor]], Any]) -> None:
        # 40 tensors of an optimizer with two states: 2 GiB on a GPU.
        numels = [machine.pick(3 << 20, 3000) + 1001 * number for number in range(39)]
        numels.append(machine.pick(40 << 20, 40_000))
        self.parameters = [torch.ones(numel, device="cuda") for numel in numels]
        side = machine.pick(2048, 32)
        self.buffer = torch.zeros(side, side, device="cuda")
        """Tensor that every forward changes, so its copies are early."""
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = make_optimizer(self.parameters)
        self.optimizer.step()
        self._iteration = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        kinds = ("exp_avg", "exp_avg_sq")
        return [*self.parameters, *(state[kind] for kind in kinds for state in states)]

    def copies(self, offset: int) -> list[TensorCopy]:
        """Return the copies of a save, to the slab from `offset` on."""
        # The second-last source is a temporary tensor of the save, which is kept until it is
        # copied.
        sources = [*self.tensors, self.buffer.t().reshape(-1), self.buffer.reshape(-1)]
        copies = []
        for number, source in enumerate(sources, start=1):
            copies.append(TensorCopy(source, offset, early=number == len(sources)))
            offset += source.nbytes
        return copies

    def nbytes(self) -> int:
        return sum(copy.source.nbytes for copy in self.copies(0))

    def values(self) -> list[torch.Tensor]:
        """Return the first element of every source at this point of the stream."""
        return [copy.source[:1].clone() for copy in self.copies(0)]

    def is_uniform(self) -> bool:
        """Return whether all elements of every tensor are equal on the GPU."""
        bounds = [tensor.aminmax() for tensor in self.tensors]
        return all(float(low.item()) == float(high.item()) for low, high in bounds)

    def forward(self) -> None:
        """Change the buffer, use and free other memory, and make gradients of this iteration."""
        self._iteration += 1
        self.buffer.add_(1.0)
        for _ in range(3):
            scratch = torch.empty_like(self.parameters[-1])
            scratch.fill_(-7.0)
        if self._iteration % 3 == 0:
            del scratch
            torch.cuda.empty_cache()
        for parameter in self.parameters:
            parameter.grad.fill_(float(self._iteration))

    def step(self) -> None:
        self.optimizer.step()


class GraphTraining(EagerTraining):
    """Model whose step is a graph; the wait for copies is outside the graph, as in Megatron."""

    def __init__(self, make_optimizer: Callable[[list[torch.Tensor]], Any]) -> None:
        super().__init__(make_optimizer)
        self._stream = torch.cuda.Stream()
        self._graph: Any = None

    def capture(self) -> None:
        with machine.captured(self._stream) as graph:
            self.optimizer.step()
        self._graph = graph

    def step(self) -> None:
        if self._graph is None:
            self.optimizer.step()
            return
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            hook(self.optimizer, (), {})
        self._graph.replay()


class RandomSaves:
    """Saves into two slots at random times, with a check of the slots."""

    def __init__(self, nbytes: int, slab: Slab, stager: Stager) -> None:
        self.slab, self.stager = slab, stager
        stager.pin(None)
        stager.wait_pinned()
        if machine.simulated_node is not None:
            machine.simulated_node.d2h_bytes_per_s = nbytes / 0.05
        self._random = random.Random(1)
        self.number = 0
        """Number of saves so far."""

    def save(self, training: EagerTraining, meanwhile: Callable[[], None] | None = None) -> str:
        """Train, save and continue; return the difference in the slot, or an empty text.

        Args:
            meanwhile: function to call after the save, in place of the next step.
        """
        for _ in range(self._random.randint(0, 1)):
            self._iteration(training)
        slot = self.slab.slots[self.number % 2]
        self.number += 1
        expected = training.values()
        errors: list[BaseException | None] = []
        copies = training.copies(slot.data_offset)
        stage(self.stager, copies, lambda _, error: errors.append(error))
        if meanwhile is not None:
            meanwhile()
        for _ in range(self._random.randint(1, 3)):
            self._iteration(training)
        self.stager.wait()
        if errors != [None]:
            return f"not copied: {errors[0]}"
        return self._difference(training, slot, [float(value.item()) for value in expected])

    def _iteration(self, training: EagerTraining) -> None:
        machine.keep_busy(self._random.uniform(0.0, machine.pick(0.06, 0.002)))
        training.forward()
        machine.keep_busy(self._random.uniform(0.0, machine.pick(0.02, 0.001)))
        training.step()

    def _difference(self, training: EagerTraining, slot: Slot, expected: list[float]) -> str:
        wrong = []
        for number, (copy, value) in enumerate(
            zip(training.copies(slot.data_offset), expected, strict=True)
        ):
            view = memoryview(self.slab.memory)[copy.offset : copy.offset + copy.source.nbytes]
            low, high = torch.frombuffer(view, dtype=torch.float32).aminmax()
            if not float(low) == float(high) == value:
                wrong.append(f"tensor {number}: {float(low)} to {float(high)}, not {value}")
        return "; ".join(wrong[:3])


def run(report: Report) -> None:
    """Train with every optimizer, save at random times, and check all slots."""
    nbytes = EagerTraining(FusedAdam).nbytes()
    with machine.staging(2, nbytes, part_nbytes=1 << 16) as (slab, stager):
        saves = RandomSaves(nbytes, slab, stager)
        for name, make in _optimizers():
            if machine.seconds_left() < _LEAST_S:
                report.skip(name, "no time left")
            else:
                _eager(report, name, make, saves)
        if machine.seconds_left() > _LEAST_S:
            _in_graphs(report, saves)
    report.figure("saves checked while training went on", saves.number, "saves", headline=True)


def _optimizers() -> Iterable[tuple[str, Callable[[list[torch.Tensor]], Any]]]:
    yield "AdamW, foreach", lambda tensors: torch.optim.AdamW(tensors, foreach=True)
    if machine.simulated_node is None:  # these optimizers need a real device
        yield "AdamW, fused", lambda tensors: torch.optim.AdamW(tensors, fused=True)
        yield "AdamW, capturable", _capturable
    yield "a stand-in for Apex's FusedAdam", FusedAdam


def _capturable(tensors: list[torch.Tensor]) -> Any:
    return torch.optim.AdamW(tensors, foreach=True, capturable=True)


def _eager(
    report: Report, name: str, make: Callable[[list[torch.Tensor]], Any], saves: RandomSaves
) -> None:
    training = EagerTraining(make)
    StepHook(saves.stager.before_change).install(None, [training.optimizer])
    wrong = [saves.save(training) for _ in range(machine.pick(8, 3))]
    _report_result(report, f"slots hold one step: {name}", training, wrong)


def _in_graphs(report: Report, saves: RandomSaves) -> None:
    for moment in ("before the first save", "during a save"):
        training = GraphTraining(machine.pick(_capturable, InPlaceOptimizer))
        StepHook(saves.stager.before_change).install(None, [training.optimizer])
        wrong = []
        if moment == "before the first save":
            training.capture()
        else:
            training.forward()
            wrong.append(saves.save(training, training.capture))
        wrong += [saves.save(training) for _ in range(machine.pick(4, 2))]
        _report_result(report, f"slots hold one step: a step captured {moment}", training, wrong)


def _report_result(report: Report, what: str, training: EagerTraining, wrong: list[str]) -> None:
    if not training.is_uniform():
        report.skip(what, "this optimizer's kernels give equal elements different values")
        return
    broken = [text for text in wrong if text]
    report.must(what, not broken, broken[0] if broken else f"{len(wrong)} saves")


class InPlaceOptimizer(torch.optim.Optimizer):
    """Optimizer that changes states like Adam's in place, for the simulated node's graphs."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors, {})
        for tensor in tensors:
            states = {kind: torch.zeros_like(tensor) for kind in ("exp_avg", "exp_avg_sq")}
            self.state[tensor] = states

    def step(self, closure: Any = None) -> None:
        for tensor, state in self.state.items():
            tensor.add_(1.0)
            for value in state.values():
                value.add_(2.0)
