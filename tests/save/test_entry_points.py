"""Wrappers around Megatron's training functions."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_flashckpt.config import AgentConfig, Config, Trace
from megatron_flashckpt.errors import ConfigError, UnsupportedError
from megatron_flashckpt.megatron_lm import stock
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.save import entry_points
from megatron_flashckpt.save.copy_figures import CopyFigures
from megatron_flashckpt.save.open_checkpointer import _staged_line
from megatron_flashckpt.save.request import SaveReport, SaveRequest
from megatron_flashckpt.save.session import session
from megatron_flashckpt.tracing import recorder
from tests.save.test_gpu_staging import refuse
from tests.simulated_gpu import simulated_gpus

Job = Callable[..., Namespace]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a function that sets Megatron's arguments and one of its own functions."""

    def begin(name: str, function: Callable[..., Any], **flags: Any) -> Namespace:
        args = Namespace(**{"save": "/save", "train_iters": 10, **flags})
        monkeypatch.setitem(stock._ORIGINALS, ("training", name), function)
        monkeypatch.setattr(stock.checkpointing(), "get_args", lambda: args)
        return args

    return begin


def test_the_first_step_of_a_job_that_is_left_to_megatron_prepares_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check would refuse a model that shards its parameters itself."""

    def prepare(root: str) -> None:
        raise AssertionError(f"saves to {root} are prepared")

    args = job("train_step", lambda model: f"{model} made", use_megatron_fsdp=True)
    monkeypatch.setattr(session, "startup", prepare)
    assert entry_points.train_step("step") == "step made"
    args.use_megatron_fsdp = False
    with pytest.raises(AssertionError, match="saves to /save are prepared"):
        entry_points.train_step("step")


@pytest.mark.parametrize(
    ("imported", "has_async_utils", "replaced"),
    [
        (["update_num_microbatches"], True, []),
        (["update_num_microbatches", "initialize_megatron"], True, ["initialize_megatron"]),
        (["update_num_microbatches"], False, ["update_num_microbatches"]),
        (["initialize_megatron", "train_step"], True, []),
    ],
    ids=["checkpointing", "async_utils", "before core 0.7", "complete"],
)
def test_the_earliest_function_of_a_module_that_is_being_imported_is_replaced(
    imported: list[str],
    has_async_utils: bool,
    replaced: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If only imports were swapped, Megatron's `training` module imports ours halfway."""
    training = ModuleType("training")
    training.__package__ = "megatron.training"
    for name in imported:
        setattr(training, name, lambda: None)
    names: list[str] = []
    monkeypatch.setattr(stock, "loaded", lambda name: training)
    monkeypatch.setattr(stock, "_ORIGINALS", {})
    monkeypatch.setattr(entry_points, "exists", lambda module: has_async_utils)
    monkeypatch.setattr(stock, "replace", lambda module, name, wrapper: names.append(name))
    entry_points.watch_from_import()
    assert names == replaced


@pytest.mark.parametrize(
    ("flags", "is_prepared"),
    [
        ({}, True),
        ({"save": None}, False),
        ({"skip_train": True}, False),
        ({"train_iters": 0}, False),
        ({"use_megatron_fsdp": True}, False),
    ],
)
def test_saves_are_prepared_when_a_model_that_will_be_trained_is_built(
    job: Job, flags: dict[str, object], is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that does not train may lack permission to write."""
    prepared: list[tuple[object, ...]] = []

    class Startup:
        def __init__(self, root: str) -> None:
            self.root = root

        def prepare(self, job: JobState) -> None:
            prepared.append((self.root, job.chunks, job.optimizer))

    built = (["model"], "optimizer", "scheduler")
    job("setup_model_and_optimizer", lambda provider: built, **flags)
    monkeypatch.setattr(stock.checkpointing(), "unwrap_model", lambda model: model)
    monkeypatch.setattr(session, "startup", Startup)
    assert entry_points.setup_model_and_optimizer("provider") is built
    assert prepared == ([("/save", ["model"], "optimizer")] if is_prepared else [])


@pytest.mark.parametrize(
    ("flags", "is_kept"),
    [
        ({}, True),
        ({"use_megatron_fsdp": True}, False),
        ({"ckpt_convert_format": "torch"}, False),
        ({"save": None}, False),
    ],
)
def test_a_save_of_ours_leaves_gpu_memory_in_torch_s_cache(
    job: Job, flags: dict[str, object], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after Megatron's own `empty_cache` allocates gigabytes again."""
    emptied: list[str] = []

    def empty_cache() -> None:
        emptied.append(threading.current_thread().name)

    def save_and_time() -> None:
        other = threading.Thread(target=lambda: torch.cuda.empty_cache(), name="other")
        other.start()
        other.join()
        torch.cuda.empty_cache()
        raise ValueError("no")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    job("save_checkpoint_and_time", save_and_time, **flags)
    with pytest.raises(ValueError, match="no"):
        entry_points.save_checkpoint_and_time()
    assert torch.cuda.empty_cache is empty_cache
    assert emptied == (["other"] if is_kept else ["other", "MainThread"])


def saved(job: Job, work: Callable[[], object] = lambda: None) -> SaveReport:
    """Return the report on a save in whose call Megatron does `work`."""
    recorders = []

    def save_and_time() -> None:
        recorders.append(recorder())
        work()

    job("save_checkpoint_and_time", save_and_time)
    entry_points.save_checkpoint_and_time()
    return SaveReport(SaveRequest(5, JobState(chunks=[])), *recorders)


def test_the_staged_line_tells_a_wait_for_queued_kernels_from_an_idle_gpu(job: Job) -> None:
    """Megatron's timers synchronize the GPU, which meanwhile does the last step's work."""
    go = threading.Event()

    def work() -> None:
        threading.Timer(0.3, go.set).start()
        torch.cuda.synchronize()
        time.sleep(0.02)

    with simulated_gpus(1):
        torch.cuda.current_stream().enqueue(go.wait)
        report = saved(job, work)
        torch.cuda.synchronize()
        line = _staged_line(report, CopyFigures())
    times = re.search(
        r"blocked ([\d.]+) ms as the .* sees it, ([\d.]+) ms of them with an idle", line
    )
    assert times is not None, line
    blocked_ms, idle_ms = map(float, times.groups())
    assert blocked_ms >= 300
    assert 20 <= idle_ms <= blocked_ms - 250


@pytest.mark.parametrize("obstacle", ["no GPU", "failing call", "graph capture", "queued kernel"])
def test_a_save_whose_idle_time_is_unknown_names_none(job: Job, obstacle: str) -> None:
    """Nothing waits for the GPU, and no save fails or breaks a capture for the sake of a figure."""
    if obstacle == "no GPU":
        assert "idle" not in _staged_line(saved(job), CopyFigures())
        return
    go = threading.Event()
    with simulated_gpus(1) as node:
        if obstacle == "failing call":
            node.refusals["Event.record"] = refuse
        elif obstacle == "queued kernel":
            torch.cuda.current_stream().enqueue(go.wait)
        with node.capture() if obstacle == "graph capture" else contextlib.nullcontext():
            report = saved(job)
            if obstacle == "graph capture":
                assert all(call.name != "Event.record" for call in node.calls)
        if obstacle != "queued kernel":
            torch.cuda.synchronize()
        assert "idle" not in _staged_line(report, CopyFigures())
        go.set()


@pytest.mark.parametrize("save", ["msc://profile/run", "/save/\udcff"])
def test_a_save_directory_that_cannot_be_used_is_refused_before_the_model_is_built(
    job: Job, save: str
) -> None:
    job("setup_model_and_optimizer", lambda: pytest.fail("the model is built"), save=save)
    with pytest.raises(ConfigError):
        entry_points.setup_model_and_optimizer()


def test_a_loop_without_megatrons_args_is_told_what_to_call_instead() -> None:
    """Megatron's own error is an `AssertionError: args is not initialized.`"""
    with pytest.raises(UnsupportedError, match=r"megatron_flashckpt\.Checkpointer"):
        stock.get_args()


URL = "s3://bucket/job"


@pytest.mark.parametrize(
    ("arguments", "config", "remedy"),
    [
        ({"log_progress": True}, Config(), "leave out --log-progress"),
        ({"wandb_project": "p", "wandb_save_dir": ""}, Config(), "give --wandb-save-dir"),
        ({}, Config(agent=AgentConfig(log_in_save_directory=True)), "set 'agent.log_in"),
        ({}, Config(trace=Trace(directory="traces")), "give 'trace.directory' as"),
    ],
)
def test_a_setting_that_writes_files_beside_objects_is_refused(
    arguments: dict[str, object], config: Config, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"{URL}: .*{re.escape(remedy)}"):
        entry_points.refuse_local_files(Namespace(save=URL, **arguments), config)
    elsewhere = Namespace(save=URL, log_progress=False, wandb_project="p", wandb_save_dir="/logs")
    entry_points.refuse_local_files(elsewhere, Config(trace=Trace(directory="/logs/traces")))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1,), {}), ((1, True), {}), ((), {"iteration": 1, "blocking": True}), ((1,), {"last": True})],
)
def test_one_argument_of_a_call_is_found_without_binding_all(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    def function(iteration: int, blocking: bool = False, *, last: bool = False) -> None: ...

    bound = stock.bind(function, args, kwargs)
    assert {name: stock.argument(function, name, args, kwargs) for name in bound} == bound
    assert stock.argument(function, "of a later release", args, kwargs) is None
