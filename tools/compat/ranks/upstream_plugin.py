"""Pytest plugin of `scripts/compat --upstream-tests`: one rank of a run of Megatron's unit tests.

Every rank loads it with `-p upstream_plugin`, before any test module. It selects the tests that
call `save_checkpoint` or `load_checkpoint`. With UPSTREAM_ENTRY_POINT=flashckpt it replaces these
functions by ours; `stock` keeps them. It writes a JSON line per test to the directory
UPSTREAM_RESULTS.

If a test fails on one rank, the other ranks wait in a collective until it times out. After every
test the ranks meet at the driver's store and start the next test with new process groups.
"""

from __future__ import annotations

import datetime
import functools
import gc
import inspect
import itertools
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import packaging.version
import pytest
import torch.distributed as dist

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OURS = os.environ["UPSTREAM_ENTRY_POINT"] == "flashckpt"
#: Timeout of every collective; ranks wait for each other up to four times as long after a test.
TIMEOUT = datetime.timedelta(seconds=90)
#: Failed parameter sets after which the others of a test are not tried, if none has passed.
PATIENCE = 4
NOT_TRIED = "not tried, because the first ones fail"
ENTRY_POINTS = ("save_checkpoint", "load_checkpoint")

_meeting_place = dist.TCPStore("localhost", int(os.environ["UPSTREAM_PORT"]), timeout=5 * TIMEOUT)
_calls = dict.fromkeys(ENTRY_POINTS, 0)


# ---------------------------------------------------------------------- before the first import


def _no_download(*_: Any, **__: Any) -> None:
    """Replace a download of Megatron's conftest: no selected test reads the data."""


_module = "tests.test_utils.python_scripts.download_unit_tests_dataset"
sys.modules[_module] = types.ModuleType(_module)
sys.modules[_module].download_and_extract_asset = _no_download  # type: ignore[attr-defined]


def _with_timeout(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "timeout": TIMEOUT})

    return made


_tests_done = 0
_groups = itertools.count()


def _rendezvous(_: str, rank: int, world_size: int, **__: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store without addresses of abandoned process groups."""
    yield dist.PrefixStore(f"{_tests_done}/{next(_groups)}", _meeting_place), rank, world_size


dist.init_process_group = _with_timeout(dist.init_process_group)
dist.new_group = _with_timeout(dist.new_group)
dist.rendezvous = _rendezvous


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[function.__name__] += 1
        return function(*args, **kwargs)

    return counted


def _put_ours_in_place() -> None:
    """Install ours as the launcher does, with saves that return when they are complete.

    Megatron's tests expect a complete save. Some also check that Megatron's `.metadata` exists, so
    rank 0 makes an empty file of that name.
    """
    from megatron_flashckpt import checkpointing, launch
    from megatron_flashckpt.file_format.file_names import iteration_dir
    from megatron_flashckpt.megatron_lm import stock
    from megatron_flashckpt.save.session import session

    @functools.wraps(checkpointing.save_checkpoint)
    def save_and_wait(*args: Any, **kwargs: Any) -> None:
        checkpointing.save_checkpoint(*args, **kwargs)
        session.finalize(blocking=True)
        margs = stock.checkpointing().get_args()
        call = stock.SaveCall.of(args, kwargs)
        if RANK == 0 and not call.non_persistent:
            (Path(margs.save) / iteration_dir(call.iteration) / ".metadata").touch()
        dist.barrier()

    # The launcher does not replace a function that was replaced already.
    stock.replace("checkpointing", "save_checkpoint", _counted(save_and_wait))
    stock.replace("checkpointing", "load_checkpoint", _counted(checkpointing.load_checkpoint))
    launch.install()


def _without_transformer_engine() -> None:
    """Build layers of Megatron's own parts where tests ask for Transformer Engine's."""
    from megatron.core import utils
    from megatron.core.models.gpt import gpt_layer_specs

    # Version 0 has none of the features that Megatron's tests check for.
    utils._te_version = utils._te_version or packaging.version.Version("0")
    layer = gpt_layer_specs.get_gpt_layer_local_spec
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = _with_own_parts(layer)
    for name in ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
        setattr(gpt_layer_specs, name, _with_own_parts(getattr(gpt_layer_specs, name)))


def _with_own_parts(make_spec: Callable[..., Any]) -> Callable[..., Any]:
    takes = inspect.signature(make_spec)

    @functools.wraps(make_spec)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = takes.bind(*args, **kwargs).arguments
        if "use_transformer_engine" in takes.parameters:
            given["use_transformer_engine"] = False
        # Transformer Engine's layers read the normalization from the config. RMSNorm is the default
        # with latent attention.
        norm = getattr(given.get("config"), "normalization", None)
        if norm == "RMSNorm" or given.get("multi_latent_attention"):
            given.setdefault("normalization", "RMSNorm")
        return make_spec(**{name: given[name] for name in given if name in takes.parameters})

    return made


def pytest_configure() -> None:
    _without_transformer_engine()
    if OURS:
        _put_ours_in_place()


# ---------------------------------------------------------------------- which tests


def _reaches(function: Any, seen: set[Any]) -> bool:
    """Return whether a test calls an entry point, directly or through functions of its module."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    codes = [code, *(const for const in code.co_consts if isinstance(const, types.CodeType))]
    names = {name for code in codes for name in code.co_names}
    if names & set(ENTRY_POINTS):
        return True
    module = sys.modules[function.__module__]
    values = [getattr(module, name, None) for name in names]
    return any(_reaches(value, seen) for value in values if inspect.isfunction(value))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _reaches(getattr(item, "function", None), set())]
    if "UPSTREAM_ONLY" in os.environ:
        only = json.loads(Path(os.environ["UPSTREAM_ONLY"]).read_text())
        chosen = [item for item in chosen if item.nodeid in only]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


# ---------------------------------------------------------------------- after each test


_outcome: dict[str, Any] = {}
#: Failures by test, over all ranks and parameters; a large negative number after a pass.
_failures: dict[str, int] = {}


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write a result for a module that cannot be imported, on behalf of all its tests."""
    if report.outcome != "passed":
        _write({"test": report.nodeid, **_summary(report), "calls": {}})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _tests_done, _groups
    _outcome.clear()
    _calls.update(dict.fromkeys(ENTRY_POINTS, 0))
    test = item.nodeid.partition("[")[0]
    if _failures.get(test, 0) >= PATIENCE:
        item.add_marker(pytest.mark.skip(reason=NOT_TRIED))
    result = yield
    _tests_done, _groups = _tests_done + 1, itertools.count()
    _write({"test": item.nodeid, **_outcome, "calls": dict(_calls)})
    if _meet():
        _failures.setdefault(test, 0)
        _failures[test] += 1
    elif _outcome["outcome"] == "passed":
        _failures[test] = -sys.maxsize
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Keep the first failure: later failures, as in a teardown, are consequences.
    if _outcome.get("outcome", "passed") == "passed":
        _outcome.update(_summary(report))


def _summary(report: pytest.CollectReport | pytest.TestReport) -> dict[str, Any]:
    text, crash = str(report.longrepr or ""), getattr(report.longrepr, "reprcrash", None)
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    else:
        reason = crash.message if crash else text.strip().rpartition("\n")[2]
    return {"outcome": report.outcome, "reason": reason, "text": text, "time": time.time()}


def _write(result: dict[str, Any]) -> None:
    with open(Path(os.environ["UPSTREAM_RESULTS"]) / f"rank_{RANK}.jsonl", "a") as results:
        print(json.dumps({"rank": RANK, **result}), file=results)


def _meet() -> bool:
    """Wait for all ranks; return whether one has failed. Destroy all process groups.

    A process group that a test drops without destroying it keeps its gloo threads, a hundred per
    test and rank.
    """
    _meeting_place.set(f"end {_tests_done} {RANK}", _outcome.get("outcome", "failed"))
    keys = [f"end {_tests_done} {rank}" for rank in range(WORLD_SIZE)]
    _meeting_place.wait(keys, 4 * TIMEOUT)
    outcomes = {_meeting_place.get(key) for key in keys}
    if outcomes == {b"skipped"}:
        return False
    if OURS:
        from megatron_flashckpt.save.session import session

        session.close(leave=True)
    from megatron.core import num_microbatches_calculator, parallel_state

    num_microbatches_calculator.unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    return b"failed" in outcomes
