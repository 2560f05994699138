"""Make `tests/convert/dlrover_files`: checkpoints of one state by real DLRover and stock Megatron.

    MEGATRON_LM=/path/to/clone .venv/bin/python -m tools.compat.dlrover_files [ARCHIVE ...]

An archive holds `dlrover` (DLRover 0.6.1, iteration 4; the first archive also iteration 2) and
`stock` (format `torch` of the same release, iteration 4). The release's own `pretrain_gpt.py`
trains a tiny GPT on CPU ranks, in 16 bit, with the distributed optimizer. DLRover comes from PyPI.
`EDITS` changes sizes that the releases fix: it shortens mock documents, and makes cb995d5's buckets
end after 1500 elements.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tarfile
import tempfile
from pathlib import Path

from patches.patch import TAGS
from tools.compat import real_dlrover
from tools.compat import tree as trees
from tools.compat.tree import REPO, Run, Tree, end_nurseries

FILES = REPO / "tests/convert/dlrover_files"

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--min-lr 1e-4 --lr-decay-iters 100 --lr-warmup-iters 2 --weight-decay 0.01 --clip-grad 1.0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --make-vocab-size-divisible-by 1 "
    "--split 99,1,0 --num-workers 0 --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-bias-swiglu-fusion --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0 --distributed-timeout-minutes 3 --use-distributed-optimizer --train-iters 4 "
    "--save-interval 2"
).split()
#: Release and arguments in addition to `MODEL`, by archive.
JOBS = {
    "cb995d5-tp2dp2-buckets": (
        "cb995d5",
        "--bf16 --tensor-model-parallel-size 2 --swiglu --untie-embeddings-and-output-weights "
        "--overlap-grad-reduce",
    ),
    "cb995d5-dp2-gather": (
        "cb995d5",
        "--bf16 --num-layers 1 --overlap-grad-reduce --overlap-param-gather",
    ),
    "cb995d5-pp2dp2-tied": (
        "cb995d5",
        "--fp16 --initial-loss-scale 1024 --pipeline-model-parallel-size 2 --disable-bias-linear "
        "--normalization RMSNorm",
    ),
    "core_v0.8.0-pp2dp2-tied": (
        "core_v0.8.0",
        "--bf16 --pipeline-model-parallel-size 2",
    ),
}
BUCKET = 1500
EDITS = {
    "megatron/core/datasets/gpt_dataset.py": (
        r"max_sequence_length: int = 4096",
        "max_sequence_length: int = 24",
    ),
    "megatron/core/distributed/distributed_data_parallel.py": (
        r"bucket_size: int = 40000000",
        f"bucket_size: int = {BUCKET}",
    ),
    # The conversion reads the bucket size under the name that later releases use.
    "megatron/arguments.py": (
        r"(def validate_args\(args, defaults=\{\}\):\n)",
        rf"\1    args.ddp_bucket_size = {BUCKET}\n",
    ),
}


def make(name: str, where: Path) -> None:
    tag, flags = JOBS[name]
    trees.MODEL = [*MODEL, *flags.split()]
    tree = Tree.extract(Path(os.environ["MEGATRON_LM"]), tag, TAGS[tag], where / "tree")
    for path, (pattern, text) in EDITS.items():
        file = tree.root / path
        if file.is_file():
            file.write_text(re.sub(pattern, text, file.read_text()))
    dlrover_tree = real_dlrover.swapped(tree, where / "with-dlrover")
    site = real_dlrover.install(where.parent)
    ranks = 2 if "-dp2-" in name else 4

    def job(of: Tree, entry_point: str, env: dict[str, str]) -> Run:
        arguments = ["--save", str(where / entry_point)]
        return of.run(arguments, where / f"{entry_point}.log", "stock", env, ranks=ranks)

    runs = [
        job(tree, "stock", {}),
        real_dlrover.run(dlrover_tree, site, where, lambda env: job(dlrover_tree, "dlrover", env)),
    ]
    print(name, [sorted(run.figures.items()) for run in runs])
    assert (where / "dlrover/iter_0000002/rank_00000").is_dir()
    for run in runs:
        assert sorted(run.figures) == [1, 2, 3, 4], run.log[-3000:]
    assert runs[0].figures == runs[1].figures
    left_out = ("stock/iter_0000002", "dlrover/._")
    if name != next(iter(JOBS)):
        left_out += ("dlrover/iter_0000002",)
    with tarfile.open(FILES / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted([*where.glob("stock/**/*"), *where.glob("dlrover/**/*")]):
            member = str(path.relative_to(where))
            if path.is_file() and not member.startswith(left_out):
                info = tarfile.TarInfo(member)
                info.size = path.stat().st_size
                archive.addfile(info, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="flashckpt-dlrover-") as scratch:
        for wanted in sys.argv[1:] or JOBS:
            (Path(scratch) / wanted).mkdir()
            make(wanted, Path(scratch) / wanted)
            end_nurseries()
