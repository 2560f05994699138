"""`scripts/pretrain_gpt_tiny.py` with instruments: run, never imported.

Run by `tests/support/megatron_jobs.py`.

Environment:
    TRACE_DIR     where each rank appends its trace (JSON lines, `rank_<r>.jsonl`)
    KILL          `rank:iteration ...`: that rank ends itself with SIGKILL in that iteration's
                  forward; one entry for each of the job's first incarnations
    KILL_ONCE     `glob:text:count`: KILL waits until the files hold the text so many times in all
    SIGNALS       `NAME:WHOM:ITERATION ...`: signals sent in the forward of that iteration, in the
                  first incarnation only, to the node's `agent`, to `torchrun`, to all `ranks`, or
                  to the `job` (torchrun and all ranks)
    PACE          seconds that each forward takes longer
    SCALARS       replace the writers of TensorBoard and of Weights & Biases, and trace their calls
    LEAK          `nbytes:iteration`: trace the resources of this process once per iteration; from
                  that iteration on, leak so many bytes in each
    QUANTIZED     give the model FP8 weights of that recipe (`quantized_weights.py`); trace them
                  at every save, and after a load trace how they differ from their masters
    DELTA_NET     make the model a gated delta net (`delta_net.py`), whose copies drift apart
    MTP           give the model multi-token prediction (`--mtp-num-layers`)
    FREEZE        do not train parameters whose name has this text
    REFERENCE     `iteration:step`: in the forward of that iteration, load a second model from the
                  checkpoint of iteration `step` (`reference_model.py`)
    GPU           copy saved state from this rank's simulated GPU, and trace copies (`on_gpu.py`)
    GROUP_MARKS   make Megatron identify param groups as core 0.19 does (`stand_ins.group_marks`)
    EARLY_READS   trace each file of a save directory that this rank opens before torch.distributed
                  is initialised
    STALE         `rank:iteration`: storage shows that rank this iteration in the tracker until
                  torch.distributed is initialised, as a cache of a file system may
    CONTROL       count two calls that do communicate, to show that the counter detects them

Traced: every micro-batch loss as an exact hexadecimal float, with its iteration; every
torch.distributed call made inside `save_checkpoint`; the thread that makes a slab, and its size;
the bytes of shards that each load read from storage; the plan counters at the end.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
from glob import glob
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.training.training as training
import psutil
import torch
import torch.distributed as dist
from megatron.training import get_args

from scripts import pretrain_gpt_tiny as tiny
from tests.support.jobs.traces import trace
from tests.support.processes import open_files, thread_count

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def iteration() -> int:
    """Return the iteration that is being trained, counted from 1 as in Megatron's log."""
    return int(get_args().curr_iteration) + 1


def freezing(model_provider: Any) -> Any:
    """Return `model_provider`, whose models do not train the parameters that `FREEZE` names."""

    def provide(*args: Any, **kwargs: Any) -> Any:
        model = model_provider(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = os.environ["FREEZE"] not in name
        return model

    return provide


class CountCalls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts every communication made inside: by Python name, and by the dispatcher's operator.

    Both are needed, because a caller may hold a reference to a function from before the wrapping.
    """

    NAMES = (
        "all_reduce all_gather all_gather_into_tensor all_gather_single all_gather_object "
        "all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object "
        "irecv isend monitored_barrier recv recv_object_list reduce reduce_scatter "
        "reduce_scatter_tensor scatter scatter_object_list send send_object_list "
        "batch_isend_irecv _all_gather_base _reduce_scatter_base all_gather_coalesced "
        "all_reduce_coalesced new_group"
    ).split()

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._saved: dict[Any, dict[str, Any]] = {}
        self._made: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> CountCalls:
        for module in (dist, dist.distributed_c10d):
            self._saved[module] = {
                name: getattr(module, name) for name in self.NAMES if hasattr(module, name)
            }
            for name, function in self._saved[module].items():
                setattr(module, name, self._counting(name, function))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for module, functions in self._saved.items():
            for name, function in functions.items():
                setattr(module, name, function)

    def _counting(self, name: str, function: Any) -> Any:
        if function in self._made:  # under the same name in another module
            return self._made[function]

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        self._made[function] = counted
        return counted


def watched_save(save: Any) -> Any:
    @functools.wraps(save)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = dequantizations()
        with CountCalls() as counter:
            result = save(*args, **kwargs)
        trace(event="save", iteration=args[0], calls=counter.calls)
        if "QUANTIZED" in os.environ:
            trace_quantized("saved weights", args[1], args[2], before)
        if os.environ.get("CONTROL"):
            with CountCalls() as control:
                dist.all_reduce(torch.zeros(1))
                dist.barrier()
            trace(event="control", calls=control.calls)
        return result

    return wrapper


def traced_loss(loss_func: Any) -> Any:
    def wrapper(mask: torch.Tensor, output: torch.Tensor) -> Any:
        loss, report = loss_func(mask, output)
        trace(event="loss", iteration=iteration(), value=float(loss).hex())
        return loss, report

    return wrapper


def killing_step(forward_step: Any) -> Any:
    kills = dict(enumerate(os.environ.get("KILL", "").split()))
    rank, _, when = kills.get(ATTEMPT, "").partition(":")
    signals = [one.split(":") for one in os.environ.get("SIGNALS", "").split()]
    pace_s = float(os.environ.get("PACE", "0"))

    def wrapper(batches: Any, model: Any) -> Any:
        # A forward runs once per micro-batch, so the entry is removed from the list.
        while ATTEMPT == 0 and signals and iteration() == int(signals[0][2]):
            send(*signals.pop(0)[:2])
        if rank and int(rank) == RANK and iteration() == int(when):
            await_text(os.environ.get("KILL_ONCE", ""))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pace_s)
        return forward_step(batches, model)

    return wrapper


def await_text(when: str) -> None:
    """Wait until files hold a text so many times in all; `glob:text:count`, or nothing."""
    files, _, rest = when.partition(":")
    text, _, count = rest.rpartition(":")
    deadline = time.monotonic() + 200
    while files and sum(Path(name).read_text().count(text) for name in glob(files)) < int(count):
        assert time.monotonic() < deadline, f"{files} do not say {text!r} {count} times"
        time.sleep(0.02)


def measuring_step(forward_step: Any) -> Any:
    nbytes, _, start = os.environ["LEAK"].partition(":")
    leaked: list[bytes] = []
    # The bytes that a process has from `malloc`, in all arenas: resident pages also grow with
    # fragmentation. They include Python's own objects if `PYTHONMALLOC=malloc`.
    fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    layout = {"_fields_": [(name, ctypes.c_size_t) for name in fields]}
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = type("mallinfo2", (ctypes.Structure,), layout)

    def wrapper(batches: Any, model: Any) -> Any:
        if not gc.get_freeze_count():
            gc.freeze()  # older objects need no inspection
        gc.collect()  # garbage must not look like growth
        await_commit()
        used, files = mallinfo(), open_files(os.getpid())
        trace(
            event="resources",
            iteration=iteration(),
            nbytes=used.uordblks + used.hblkhd,
            files=len(files),
            memfds=sum("memfd:" in name for name in files),
            threads=thread_count(os.getpid()),
        )
        if iteration() >= int(start):
            leaked.append(os.urandom(int(nbytes)))
        return forward_step(batches, model)

    return wrapper


def await_commit() -> None:
    """Wait until the latest save is committed; every iteration is followed by a save."""
    deadline = time.monotonic() + 60
    tracker = Path(get_args().save, "latest_checkpointed_iteration.txt")
    while iteration() > 1 and (not tracker.exists() or int(tracker.read_text()) < iteration() - 1):
        assert time.monotonic() < deadline, f"iteration {iteration() - 1} is not committed"
        time.sleep(0.002)


def send(name: str, whom: str) -> None:
    """Send a signal from rank 0, or from each rank to itself."""
    number = signal.Signals[f"SIG{name}"]
    if whom == "ranks":
        os.kill(os.getpid(), number)
    if RANK != 0:
        return
    if whom == "agent":
        from megatron_flashckpt.save.session import session

        for opened in session._open.values():
            os.kill(opened.checkpointer.link.client().agent_pid, number)
    if whom in ("torchrun", "job"):
        torchrun = psutil.Process(os.getppid())
        ranks = torchrun.children()
        torchrun.send_signal(number)
        for process in ranks if whom == "job" else ():
            process.send_signal(number)


def traced_load(load: Any) -> Any:
    """Trace the bytes of shards that a load reads from storage."""
    from megatron_flashckpt.storage.posix_store import PosixStore

    get_into = PosixStore.get_into
    nbytes = 0

    def counting(self: PosixStore, *args: Any) -> int:
        nonlocal nbytes
        got = get_into(self, *args)
        nbytes += got
        return got

    @functools.wraps(load)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        PosixStore.get_into = counting
        before = dequantizations()
        try:
            with CountCalls() as counter:
                result = load(*args, **kwargs)
        finally:
            PosixStore.get_into = get_into
        trace(event="load", iteration=result[0], read_nbytes=nbytes, calls=counter.calls)
        if "QUANTIZED" in os.environ and result[0]:
            trace_quantized("loaded weights", args[0], args[1], before)
        return result

    return wrapper


def dequantizations() -> int:
    if "QUANTIZED" not in os.environ:
        return 0
    from tests.support.jobs import quantized_weights

    return quantized_weights.QuantizedDouble.dequantizations


def trace_quantized(event: str, chunks: list[Any], optimizer: Any, dequantized: int) -> None:
    """Trace all FP8 weights, and the dequantizations since there were `dequantized`."""
    from tests.support.jobs import quantized_weights

    count = dequantizations() - dequantized
    different = quantized_weights.unlike_their_masters(chunks, optimizer)
    digests = quantized_weights.digests(chunks)
    trace(event=event, digests=digests, different=different, dequantizations=count)


def trace_early_reads() -> None:
    """Trace the files of a save directory that this rank opens to read its arguments."""
    from megatron_flashckpt.load import node_leader

    # On a slow machine some ranks may start a minute later than others.
    node_leader.APPEAR_S = node_leader.ANSWER_S = 600.0

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and not dist.is_initialized():
            name = Path(arguments[0]).name
            if name.startswith("latest_") or name.endswith((".end", ".common.msgpack")):
                trace(event="early read", name=name, pid=os.getpid())

    sys.addaudithook(note)


def show_stale_tracker() -> None:
    from megatron_flashckpt.catalog import directory

    rank, _, stale = os.environ["STALE"].partition(":")
    read = directory.tracker_text
    if int(rank) == RANK:
        directory.tracker_text = lambda store: read(store) if dist.is_initialized() else stale


def trace_slabs() -> None:
    """Trace the thread that makes a slab, and its bytes per slot, if saves are ours."""
    if not training.save_checkpoint.__module__.startswith("megatron_flashckpt"):
        return
    from megatron_flashckpt.memory.slab import Slab

    create = Slab.create

    def wrapper(slots: int, meta: int, data: int, *args: Any, **kwargs: Any) -> Slab:
        thread = threading.current_thread().name
        trace(event="slab", thread=thread, meta_nbytes=meta, data_nbytes=data)
        return create(slots, meta, data, *args, **kwargs)

    Slab.create = wrapper


class TracedWriter:
    """Replaces Megatron's writers on the rank that has them, and accepts every call."""

    def __init__(self) -> None:
        self.run: Any = mock.MagicMock()
        self.config: dict[str, Any] = {}

    def add_scalar(self, name: str, value: float, step: int, **_: Any) -> None:
        trace(event="tensorboard", name=name, value=float(value), step=int(step))

    def log(self, scalars: dict[str, Any], step: int | None = None, **_: Any) -> None:
        for name, value in scalars.items():
            trace(event="wandb", name=name, value=float(value), step=step)

    def finish(self) -> None:
        self.run = None

    def __getattr__(self, name: str) -> Any:
        return mock.MagicMock()


def be_the_writers() -> None:
    from megatron.training import global_vars

    def set_writer(variable: str, args: Any) -> None:
        if args.rank == args.world_size - 1:
            setattr(global_vars, variable, TracedWriter())

    for name in ("tensorboard", "wandb"):
        variable = f"_GLOBAL_{name.upper()}_WRITER"
        setattr(global_vars, f"_set_{name}_writer", functools.partial(set_writer, variable))


def report_counters() -> None:
    """Trace the plan counters of our checkpointer, if ours was in use."""
    session = sys.modules.get("megatron_flashckpt.save.session")
    for opened in session.session._open.values() if session else ():
        origins = opened.checkpointer.planner.plans.origins
        trace(
            event="plans",
            local=origins["kept"],
            shared=origins["found"],
            misses=origins["computed"],
        )
        if "GPU" in os.environ:
            on_gpu.report(trace, opened.checkpointer.link.stager)


if __name__ == "__main__":
    if "GROUP_MARKS" in os.environ:
        from tests.support.jobs.stand_ins import group_marks

        marks = group_marks()
        marks.__enter__()
    if "SCALARS" in os.environ:
        be_the_writers()
    if "GPU" in os.environ:
        from tests.support.jobs import on_gpu

        on_gpu.install(trace, iteration)
    trace_slabs()
    if "EARLY_READS" in os.environ:
        trace_early_reads()
    if "STALE" in os.environ:
        show_stale_tracker()
    if "QUANTIZED" in os.environ:
        from tests.support.jobs import quantized_weights

        quantized_weights.install(os.environ["QUANTIZED"])
    if "DELTA_NET" in os.environ:
        from tests.support.jobs import delta_net

        delta_net.install()
    if "MTP" in os.environ:
        from tests.support.jobs import token_prediction

        token_prediction.install()
    training.save_checkpoint = watched_save(training.save_checkpoint)
    training.load_checkpoint = traced_load(training.load_checkpoint)
    tiny.loss_func = traced_loss(tiny.loss_func)
    finalize = training.maybe_finalize_async_save

    @functools.wraps(finalize)
    def finalize_and_count(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("terminate"):
            report_counters()
        return finalize(*args, **kwargs)

    training.maybe_finalize_async_save = finalize_and_count
    step = killing_step(tiny.forward_step)
    if "REFERENCE" in os.environ:
        from tests.support.jobs import reference_model

        step = reference_model.loading_step(step, os.environ["REFERENCE"])
    tiny.train(
        tiny.datasets_provider,
        freezing(tiny.model_provider) if "FREEZE" in os.environ else tiny.model_provider,
        measuring_step(step) if "LEAK" in os.environ else step,
    )
