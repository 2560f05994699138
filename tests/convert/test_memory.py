"""Peak memory of a conversion: a few boxes instead of the model."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.convert.common.contents import Contents, of_boxes
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import open_source
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from megatron_flashckpt.layout.reshard import Box
from tests.cli.test_object_urls import copy
from tests.convert import made
from tests.convert.hf_files import make_model, weights
from tests.support.megatron_jobs import same

BOXES = 48
#: Shape of a bfloat16 box of 4 MiB.
EXTENT = (1, 2048, 1024)
MEASURED = """
import resource, sys
from pathlib import Path
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.convert.common.options import Options

# Everything that is imported or allocated once.
options = Options(memory_nbytes=32 << 20, shard_nbytes=64 << 20)
source, small, result, to = sys.argv[1:]
convert(open_source(small, None, options), Path(result, "small"), to, options)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(open_source(source, None, options), Path(result, "whole"), to, options)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def contents(boxes: int) -> Contents:
    """Return one stacked weight of `boxes` layers, which are created on each read."""

    def read(box: Box) -> torch.Tensor:
        return torch.full(box[1], float(box[0][0]), dtype=torch.bfloat16)

    dtypes = {((layer, 0, 0), EXTENT): torch.bfloat16 for layer in range(boxes)}
    key, shape = "decoder.layers.mlp.linear_fc1.weight", (boxes, *EXTENT[1:])
    weight = of_boxes(key, "weight", torch.bfloat16, shape, dtypes, read)
    return dataclasses.replace(made.contents(), tensors=[weight], optimizer=None)


def peak_of(script: str, *arguments: object) -> int:
    """Return the bytes that a script prints: how much its second conversion adds to the peak."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    options = Options(shard_nbytes=64 << 20)
    for name, boxes in (("small", 2), ("whole", BOXES)):
        write_ours(contents(boxes), root / f"flashckpt-{name}", options)
        write_torch_dist(contents(boxes), root / f"torch_dist-{name}", options)
    return root


@pytest.mark.parametrize(
    ("source", "to"),
    [("flashckpt", "torch_dist"), ("torch_dist", "flashckpt"), ("flashckpt", "safetensors")],
)
def test_a_conversion_holds_only_a_few_boxes_in_memory(
    tmp_path: Path, sources: Path, source: str, to: str
) -> None:
    whole = sources / f"{source}-whole"
    nbytes = open_source(whole, None, Options()).nbytes
    assert nbytes == 192 << 20
    small = sources / f"{source}-small"
    # The cache holds 32 MiB of chunks, and a box has 4 MiB.
    assert peak_of(MEASURED, whole, small, tmp_path, to) < 80 << 20


def test_a_conversion_from_a_bucket_holds_only_a_few_boxes_in_memory(
    tmp_path: Path, sources: Path, s3_url: str
) -> None:
    for name in ("small", "whole"):
        copy(sources / f"flashckpt-{name}", f"{s3_url}/{name}")
    urls = [f"{s3_url}/{name}" for name in ("whole", "small")]
    assert peak_of(MEASURED, *urls, tmp_path, "torch_dist") < 80 << 20


#: Peak of the second conversion, of a model to our format and back; the first is of a small model.
MEASURED_MODEL = """
import resource, sys
from pathlib import Path
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.convert.common.options import Options

def both_ways(model, result):
    options = Options(memory_nbytes=32 << 20, shard_nbytes=64 << 20, hf_config=model)
    convert(open_source(model, None, options), result / "ours", "flashckpt", options)
    convert(open_source(result / "ours", None, options), result / "hf", "hf", options)

small, whole, result = map(Path, sys.argv[1:])
both_ways(small, result / "small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
both_ways(whole, result / "whole")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_model_is_converted_a_few_tensors_at_a_time(tmp_path: Path) -> None:
    """Projections that Megatron joins are divided, for which one of them at a time is in memory."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    whole = make_model(tmp_path / "model", **sizes, num_hidden_layers=10)
    files = whole, make_model(tmp_path / "small")
    assert (whole / "model.safetensors").stat().st_size > 160 << 20
    # The cache holds 32 MiB of chunks, and the largest tensor has 8 MiB.
    assert peak_of(MEASURED_MODEL, *files[::-1], tmp_path / "results") < 80 << 20
    assert same(weights(tmp_path / "results/whole/hf"), weights(whole))
