"""Conversion of a checkpoint in a bucket of a real S3 server."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import open_source
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.storage import parallel
from tests.cli.conftest import Run, only_line
from tests.cli.test_object_urls import copy
from tests.convert import made
from tests.support.object_server import LOSE, Proxy


def test_an_iteration_of_a_bucket_is_read_in_ranges_of_a_chunk_and_after_faults(
    run: Run, tmp_path: Path, s3_url: str, s3_proxy: Proxy
) -> None:
    contents = made.contents()
    shape = (3, 2**20)
    generator = torch.Generator().manual_seed(7)
    value = torch.randn(shape, generator=generator)
    large = made.held("decoder.large.weight", "buffer", value, (((0, 0), shape),))
    contents.tensors.append(large)
    write_ours(contents, tmp_path / "save", Options())
    copy(tmp_path / "save", s3_url)
    lost = iter([LOSE, *3 * [None], LOSE])
    s3_proxy.fault_of = lambda method, path: (
        next(lost, None) if method == "GET" and path.endswith(".safetensors") else None
    )
    before = len(s3_proxy.requests)
    to = tmp_path / "to"
    ran = run("convert", s3_url, to, "--to", "flashckpt", "--iteration", made.ITERATION)
    assert ran.status == 0, ran.err
    place = f"{s3_url}/iter_{made.ITERATION:07d}"
    assert ran.lines[0].startswith(f"{place} (flashckpt, iteration {made.ITERATION}): ")
    assert made.differing(contents.tensors, open_source(to, None, Options()).contents.tensors) == []
    assert next(lost, "both faults have struck") == "both faults have struck"
    ranges = [
        re.fullmatch(r"bytes=(\d+)-(\d+)", headers["Range"])
        for (method, path), headers in zip(
            s3_proxy.requests[before:], s3_proxy.headers[before:], strict=True
        )
        if method == "GET" and path.endswith(".safetensors")
    ]
    lengths = [int(match[2]) + 1 - int(match[1]) for match in ranges if match]
    assert len(lengths) == len(ranges)
    assert max(lengths) == CHUNK_NBYTES


def test_several_chunks_of_a_box_are_read_from_a_bucket_at_a_time(
    tmp_path: Path, s3_url: str, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = made.contents()
    shape = (12, CHUNK_NBYTES)
    value = torch.arange(12, dtype=torch.uint8)[:, None].expand(shape)
    large = made.held("decoder.large.weight", "buffer", value, (((0, 0), shape),))
    contents.tensors.append(large)
    write_ours(contents, tmp_path / "save", Options())
    copy(tmp_path / "save", s3_url)
    lock, under_way, have_met, alone = threading.Lock(), list[str](), threading.Event(), list[str]()

    def wait_for_others(method: str, path: str) -> None:
        """Answer the first reads when four of them are under way."""
        with lock:
            under_way.append(path)
            if len(under_way) == 4:
                have_met.set()
        if not have_met.wait(20.0):  # the client waits 30 s
            alone.append(path)
            have_met.set()

    stored = open_source(s3_url, None, Options()).contents.tensors
    monkeypatch.setattr(parallel, "_START_S", -1.0)  # this bucket is known to be slow
    s3_proxy.fault_of = wait_for_others
    assert made.differing([large], [one for one in stored if one.name == large.name]) == []
    assert have_met.is_set()
    assert not alone


def test_what_cannot_be_converted_from_or_to_a_bucket_is_one_line(
    run: Run, tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    to = [tmp_path / "to", "--to", "torch_dist"]
    write_torch_dist(made.contents(), tmp_path / "dist", Options())
    copy(tmp_path / "dist", f"{s3_url}/dist")
    only_line(
        run("convert", f"{s3_url}/dist", *to),
        rf"{s3_url}/dist/iter_0000010: holds no committed checkpoint of megatron_flashckpt; copy a "
        "checkpoint of another program to a directory, and convert that",
    )
    only_line(run("convert", s3_url, *to), rf"{s3_url}/\S+: does not exist, so the iteration .*")
    only_line(
        run("convert", s3_url, *to, "--iteration", 4), rf"{s3_url}/iter_0000004: does not exist; .*"
    )
    with pytest.raises(SystemExit) as ended:
        run("convert", tmp_path / "dist", s3_url, "--to", "flashckpt")
    assert ended.value.code == 2
    assert (
        f"argument DST: {s3_url}: is a URL, but 'flashckpt convert' writes files only; name a "
        "directory, and copy the result to the bucket\n"
    ) in capsys.readouterr().err
    assert not (tmp_path / "to").exists()
