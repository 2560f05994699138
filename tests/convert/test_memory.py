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

# The first conversion imports and allocates everything that is needed once.
whole, small, results, *formats = sys.argv[1:]

def in_turn(name, source):
    config = Path(source) if "hf" in formats else None
    options = Options(memory_nbytes=32 << 20, shard_nbytes=64 << 20, hf_config=config)
    for to in formats:
        result = Path(results, f"{name}-{to}")
        convert(open_source(source, None, options), result, to, options)
        source = result

in_turn("small", small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
in_turn("whole", whole)
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


def peak_of(whole: object, small: object, results: Path, *formats: str) -> int:
    """Return how many bytes conversions of `whole` add to the peak of those of `small`."""
    words = (whole, small, results, *formats)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, *map(str, words)],
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
    [("torch_dist", "flashckpt"), ("flashckpt", "safetensors")],
)
def test_a_conversion_holds_only_a_few_boxes_in_memory(
    tmp_path: Path, sources: Path, source: str, to: str
) -> None:
    whole = sources / f"{source}-whole"
    nbytes = open_source(whole, None, Options()).nbytes
    assert nbytes == 192 << 20
    small = sources / f"{source}-small"
    # The cache holds 32 MiB of chunks, and a box has 4 MiB.
    assert peak_of(whole, small, tmp_path, to) < 80 << 20


def test_a_conversion_from_a_bucket_holds_only_a_few_boxes_in_memory(
    tmp_path: Path, sources: Path, s3_url: str
) -> None:
    for name in ("small", "whole"):
        copy(sources / f"flashckpt-{name}", f"{s3_url}/{name}")
    assert peak_of(f"{s3_url}/whole", f"{s3_url}/small", tmp_path, "torch_dist") < 80 << 20


def test_a_model_is_converted_a_few_tensors_at_a_time(tmp_path: Path) -> None:
    """Projections that Megatron joins are divided, for which one of them at a time is in memory."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    whole = make_model(tmp_path / "model", **sizes, num_hidden_layers=10)
    small = make_model(tmp_path / "small-model")
    assert (whole / "model.safetensors").stat().st_size > 160 << 20
    # The cache holds 32 MiB of chunks, and the largest tensor has 8 MiB.
    assert peak_of(whole, small, tmp_path, "flashckpt", "hf") < 80 << 20
    assert same(weights(tmp_path / "whole-hf"), weights(whole))
