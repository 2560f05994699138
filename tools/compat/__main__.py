"""Run every feature with every Megatron-LM release: its own `pretrain_gpt.py` on CPU ranks.

    MEGATRON_LM=/path/to/clone scripts/compat [TAG ...] [--keep DIR] [--docs]
    MEGATRON_LM=/path/to/clone scripts/compat --upstream-tests [TAG ...]

`git archive` extracts the trees from the clone, which is not changed. Jobs have four gloo ranks
(TP2 x DP2), the distributed optimizer, bf16 and dropout. `release.py` describes the features; each
one is a test of `test_releases.py`. With `--keep` a later call skips the releases that have passed.
`--upstream-tests` runs Megatron's own unit tests of saving and loading instead; see `upstream.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from patches.patch import TAGS
from tools.compat import upstream
from tools.compat.matrix import Matrix, extract, table, write_page

#: One process, which prints each test when it begins. Only the jobs have time limits.
_PYTEST = ("-n", "0", "-v", "--tb=line", "--durations=0", "-o", "faulthandler_timeout=0")


def main() -> None:
    args = _parser().parse_args()
    if args.docs and args.tags:
        sys.exit("scripts/compat: --docs writes a table of all releases: name no release with it")
    unknown = set(args.tags) - set(TAGS)
    if unknown:
        sys.exit(f"scripts/compat: no {', '.join(sorted(unknown))}; there are {', '.join(TAGS)}")
    if not os.environ.get("MEGATRON_LM"):
        sys.exit(
            "scripts/compat: skipped, there is no Megatron-LM: clone NVIDIA/Megatron-LM and set "
            "MEGATRON_LM to the clone"
        )
    clone = Path(os.environ["MEGATRON_LM"])
    where = args.keep or Path(tempfile.mkdtemp(prefix="flashckpt-compat-"))
    try:
        if args.upstream_tests:
            tags = args.tags or upstream.TAGS
            failed = upstream.main(tags, lambda tag: extract(tag, where, clone)) > 0
        else:
            failed = releases(Matrix(clone, where, args.tags or list(TAGS)), docs=args.docs)
    finally:
        if not args.keep:
            shutil.rmtree(where)
    sys.exit(failed)


def releases(matrix: Matrix, *, docs: bool) -> bool:
    """Run the tests of the releases and print the table; return True if any test failed."""
    tests = str(Path(__file__).with_name("test_releases.py"))
    status = pytest.main([tests, *_PYTEST], plugins=[matrix])
    ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if ended and len(matrix.columns) == len(matrix.tags):
        lines = list(table(matrix.columns))
        print("\n".join(lines))
        if docs:
            write_page(lines)
    return status != pytest.ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/compat", formatter_class=argparse.RawTextHelpFormatter, description=__doc__
    )
    parser.add_argument("tags", nargs="*", metavar="TAG", help=f"one of {', '.join(TAGS)}")
    parser.add_argument(
        "--keep",
        type=Path,
        help="directory for trees, checkpoints and logs; a later call continues from there",
    )
    parser.add_argument(
        "--docs", action="store_true", help="replace the table in docs/ by the new one"
    )
    parser.add_argument(
        "--upstream-tests",
        action="store_true",
        help="run Megatron's own tests of saving and loading",
    )
    return parser


if __name__ == "__main__":
    main()
