"""Kinds of models whose tensors are cut in ways of their own are loaded bit for bit.

The models are Megatron's own classes. One rank, two tensor ranks and two expert ranks save each of
them; new processes load it under the same layout and the next one, and save it again, unchanged.
`tests/convert/test_kinds_of_models.py` saves and loads all kinds on one rank.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.layout_jobs import Wrong, run_layouts, sources
from tests.support.megatron_jobs import assemble

TP2 = ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
#: Megatron wants experts in its arguments before it takes an expert parallel size.
EXPERTS = ["--num-experts", "4", "--disable-bias-linear"]
#: Layouts: name -> ranks, flags.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tensors": (2, [*TP2, "--sequence-parallel"]),
    "experts": (2, ["--expert-model-parallel-size", "2", *EXPERTS]),
}
KINDS = ("bert", "t5", "mla", "experts", "mamba", "llava")
CUT = ("mla", "experts", "mamba")


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ran(where: Path) -> Wrong:
    cases = [
        {"kind": kind, "name": kind, "number": number, "optimizer": "bf16 distributed"}
        for number, kind in enumerate(CUT, 1)
    ]
    (where / "cases.json").write_text(json.dumps(cases))
    modes = dict.fromkeys(("save", "load"), "cases.json")
    return run_layouts(where, "megatron_models.py", LAYOUTS, modes, iterations=20)


@pytest.mark.parametrize("kind", CUT)
def test_a_kind_of_model_is_loaded_bit_for_bit_under_two_layouts(
    ran: Wrong, where: Path, kind: str
) -> None:
    number = 1 + CUT.index(kind)
    for loaded_by, saved_by in sources(LAYOUTS).items():
        assert ran[kind, loaded_by, "saved"] == []
        for layout in saved_by:
            whole = assemble(where / layout / "save", number)
            assert ran[kind, loaded_by, f"from {layout}"] == []
            again = assemble(where / loaded_by / f"from-{layout}", number)
            assert again.keys() == whole.keys()
            unequal = [name for name in whole if not torch.equal(whole[name], again[name])]
            assert unequal == [], f"saved by {layout}, loaded by {loaded_by}"
