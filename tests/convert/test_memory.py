"""Peak memory of a conversion: a few boxes instead of the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import open_source
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from tests.convert.big import BOXES, contents

MEASURED = """
import resource, sys
from pathlib import Path
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.convert.common.options import Options
from tests.convert.big import contents

# Everything that is imported or allocated once.
options = Options(memory_nbytes=32 << 20, shard_nbytes=64 << 20)
source, small, result, to = map(Path, sys.argv[1:])
convert(open_source(small, None, options), result / "small", to.name, options)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(open_source(source, None, options), result / "whole", to.name, options)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


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
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, whole, small, tmp_path, to]
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    # The cache holds 32 MiB of chunks, and a box has 4 MiB.
    assert int(done.stdout) < 80 << 20
