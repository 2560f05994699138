"""Device and capture mode, which the package's threads set before they call CUDA."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from megatron_flashckpt.memory import cuda
from tests.simulated_gpu import Node, simulated_gpus
from tests.support.trainer import PATIENCE_S

T = TypeVar("T")


def in_new_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1, "ours") as pool:
        return pool.submit(work).result(PATIENCE_S)


def capture_mode(node: Node) -> str:
    return node.here.capture_mode


def test_without_cuda_and_before_it_is_initialized_there_is_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cuda.current_device() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda.current_device() is None


def test_a_thread_enters_the_device_of_its_rank() -> None:
    with simulated_gpus() as node:
        in_new_thread(lambda: cuda.enter_thread(None))
        assert node.calls == [], "a thread without a device calls nothing"
        torch.cuda.set_device(5)
        device = cuda.current_device()
        assert device == 5
        assert in_new_thread(cuda.current_device) == 0, "a new thread has not set its device"

        def work() -> tuple[int | None, str]:
            cuda.enter_thread(device)
            return cuda.current_device(), capture_mode(node)

        assert in_new_thread(work) == (5, "relaxed")
        assert capture_mode(node) == "global", "the training thread keeps its mode"
        node.devices[5].fail("an illegal memory access was encountered")
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            in_new_thread(work)


def test_on_rocm_hip_s_function_of_the_same_meaning_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names and the value of the mode are those of hip_runtime_api.h; no ROCm machine ran this."""
    modes: list[int] = []

    class Hip:
        @staticmethod
        def hipThreadExchangeStreamCaptureMode(mode: Any) -> int:
            modes.append(mode._obj.value)
            return 0

    with simulated_gpus(), monkeypatch.context() as changed:
        changed.setattr(cuda, "_PREFIX", "hip")
        changed.setattr(cuda, "runtime_library", Hip)
        in_new_thread(lambda: cuda.enter_thread(1))
    assert modes == [2]


@pytest.mark.parametrize("text", ["CUDA error: an illegal access", "HIP error: an illegal access"])
def test_errors_of_both_runtimes_are_recognized_by_their_text(text: str) -> None:
    assert cuda.is_error(RuntimeError(text))
    assert not cuda.is_error(RuntimeError(f"no {text}"))


def test_a_thread_that_has_entered_breaks_no_capture() -> None:
    with simulated_gpus() as node:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

        def work() -> bool:
            cuda.enter_thread(0)
            return event.query()

        with node.capture():
            assert in_new_thread(work)
        with pytest.raises(torch.AcceleratorError), node.capture():
            in_new_thread(event.query)


def test_a_thread_enters_even_if_its_mode_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpus() as node:

        def work() -> tuple[int | None, str]:
            cuda.enter_thread(3)
            return cuda.current_device(), capture_mode(node)

        def refuse() -> None:
            raise torch.AcceleratorError("CUDA error: no")

        node.refusals["cudaThreadExchangeStreamCaptureMode"] = refuse
        for library in (None, object(), node.runtime):
            with monkeypatch.context() as changed:
                changed.setattr(cuda, "runtime_library", lambda library=library: library)
                assert in_new_thread(work) == (3, "global")


MAPS = """\
55d0c0a00000-55d0c0a01000 r--p 00000000 08:01 1    /usr/bin/python3.11
7f0000000000-7f0000100000 rw-p 00000000 00:00 0    /of any bytes \udcff
7f0000100000-7f0000200000 rw-p 00000000 00:00 0    [heap]
7f0000200000-7f0000300000 r-xp 00000000 08:01 2    /opt/libcudart.so.12/libother.so
7f0000200000-7f0000300000 r-xp 00000000 08:01 2    /opt/lib/libcudart_other.so
{line}
7f0000500000-7f0000600000 r-xp 00000000 08:01 4    /usr/lib/libcuda.so.1
"""


@pytest.mark.parametrize(
    "path",
    [
        "/usr/local/cuda/lib64/libcudart.so.12.4.127",
        "/home/a user/nvidia/cuda_runtime/lib/libcudart.so.13",
        "/venv/torch/lib/libcudart-9335f6a2.so.12",  # name of a library bundled in a wheel
        "/usr/lib/libcudart.so",
        "/opt/rocm/lib/libamdhip64.so.7.0.70000",
    ],
)
def test_the_mapped_runtime_is_found(tmp_path: Path, path: str) -> None:
    maps, loaded = tmp_path / "maps", []
    line = f"7f0000400000-7f0000500000 r-xp 0 08:01 3    {path}"
    maps.write_text(MAPS.format(line=line), errors="surrogateescape")
    assert cuda._find_library(maps, lambda name: loaded.append(name) or "library") == "library"
    assert loaded == [path]


@pytest.mark.parametrize("name", ["", "libcudart.so.12", "libcudart.so.12 (deleted)"])
def test_without_a_usable_library_there_is_no_runtime(tmp_path: Path, name: str) -> None:
    def refuse(path: str) -> None:
        assert path == "/usr/lib/libcudart.so.12", "a deleted file must not be opened by its name"
        assert "deleted" not in name
        raise OSError(f"{path}: cannot open shared object file: No such file or directory")

    maps = tmp_path / "maps"
    line = f"7f0000400000-7f0000500000 r-xp 0 08:01 3    /usr/lib/{name}" if name else ""
    maps.write_text(MAPS.format(line=line), errors="surrogateescape")
    assert cuda._find_library(maps, refuse) is None


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch for CUDA loads the runtime without a GPU, too"
)
def test_a_process_without_cuda_has_no_runtime() -> None:
    assert cuda.runtime_library() is None
