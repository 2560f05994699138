"""Tests of the section with real Megatron, whose jobs run on a CPU rank without a GPU."""

from __future__ import annotations

import io
import json

from tools.gpu_check.report import FIGURE, MUST, Report
from tools.gpu_check.sections import megatron


def test_the_megatron_section_measures_saves_and_resumes_bit_for_bit() -> None:
    stream = io.StringIO()
    megatron.run(Report(megatron.LETTER, stream))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line for line in lines if line["kind"] == MUST and not line["ok"]] == []
    rules = [line["what"] for line in lines if line["kind"] == MUST]
    for source in ("memory", "storage"):
        assert f"a restart resumes from {source}, from the newest whole save" in rules
        assert f"restart from {source}: all losses are equal" in rules
        for iteration in (42, 45):
            what = f"restart from {source}: all tensors after iteration {iteration} are equal"
            assert what in rules
    figures = [line["what"] for line in lines if line["kind"] == FIGURE]
    for every in (1, 5):
        assert f"iteration, save every {every}" in figures
        assert f"true price of a save, save every {every}" in figures


def test_blocks_alternate_and_their_last_iteration_is_not_saved() -> None:
    assert megatron.blocks(begin=6, rounds=1, length=6) == [
        megatron.Block("no save", 6, 12, ()),
        megatron.Block("save every 5", 12, 18, (12,)),
        megatron.Block("save every 1", 18, 24, (18, 19, 20, 21, 22)),
    ]
