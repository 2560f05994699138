"""Tables of host memory in the documents: their figures are what `flashckpt plan` computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.cli.plan import sizes_of
from megatron_flashckpt.sizing.cluster_model import GB, Cluster, host_memory, plan

REPO = Path(__file__).resolve().parents[2]
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer"
)
OF_7B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
    "--padded-vocab-size 32000"
)
OF_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --padded-vocab-size 128256 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
)
OF_405B = (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
    "--group-query-attention --num-query-groups 8 --padded-vocab-size 128256 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
)
#: The jobs of both tables, and those that only the longer one shows.
SHORT = [("7 B", OF_7B, 8), ("70 B", OF_70B, 64), ("405 B", OF_405B, 1024)]
LONG = [*SHORT, ("7 B", OF_7B, 64), ("70 B", OF_70B, 512), ("405 B", OF_405B, 16384)]
#: Measured on an H200 with PCIe 5.0 x16.
CLUSTER = Cluster(pcie_gb_s=54.0)


def row(name: str, model: str, gpus: int) -> str:
    sizes = sizes_of(f"{model} {LLAMA}".split(), gpus, None)
    memory = [
        f"{slots * sizes.rank_nbytes / GB:.3g} / "
        f"{host_memory(sizes, CLUSTER, slots, 'none', 8).nbytes / GB:.3g}"
        for slots in (1, 2, 3)
    ]
    copies = f"{1000 * plan(sizes, CLUSTER).stage_s:.0f} ms"
    cells = [name, f"{gpus:,}", f"{sizes.total_nbytes / GB:,.0f} GB", *memory, copies]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize(
    ("document", "jobs"), [("README.md", SHORT), ("docs/concepts.md", LONG)], ids=["short", "long"]
)
def test_the_table_of_host_memory_is_what_the_package_computes(
    document: str, jobs: list[tuple[str, str, int]]
) -> None:
    lines = (REPO / document).read_text().splitlines()
    shown = [line for line in lines if line.split("|")[1:2] and line.split("|")[1].endswith(" B ")]
    assert sorted(shown) == sorted(row(*job) for job in jobs)
