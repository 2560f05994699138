"""Ranks of jobs of a Megatron-LM tree, forked from one process that has imported the tree.

`scripts/compat` runs `release_ranks.py MODULE,...` in the tree's root, with the tree's environment.
The process imports the modules, reads the arguments of one job (`run_forked`) per line of JSON,
runs it, and answers with one line. A fork saves the import of Megatron, which takes most of a short
job's time.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

from tests.support.forked.job import run_forked


def main() -> None:
    # Output of imports goes to stderr; stdout carries answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1].split(","):
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        job = json.loads(line)
        nodes, log = [{**os.environ, **job.pop("env")}], Path(job.pop("log"))
        try:
            run_forked(nodes=nodes, cwd=Path.cwd(), log=log, context=context, **job)
        except AssertionError:  # the job took too long
            traceback.print_exc()
        print("ended", file=answers, flush=True)


if __name__ == "__main__":
    main()
