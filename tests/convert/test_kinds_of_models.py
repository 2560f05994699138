"""Every kind of model that Megatron has is converted to and from `torch_dist`, bit for bit.

The models are those of `tests/integration/test_megatron_models.py`. Megatron's own functions load
what was converted from our checkpoint, and ours load what was converted from Megatron's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from tests.integration.test_megatron_models import KINDS
from tests.support.layout_jobs import Wrong, run_layouts

ONE = {"one": (1, [])}
#: Format of the result, and the directory with its source.
SOURCES = {"torch_dist": "save", "flashckpt": "stock"}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def ran(where: Path) -> Wrong:
    cases = [
        {"kind": kind, "name": kind, "number": number, "optimizer": "bf16 distributed"}
        for number, kind in enumerate(KINDS, 1)
    ]
    (where / "cases.json").write_text(json.dumps(cases))
    modes = dict.fromkeys(("save", "stock"), "cases.json")
    run_layouts(where, "megatron_models.py", ONE, modes, iterations=20)
    for case in cases:
        for to, name in SOURCES.items():
            source = open_source(where / "one" / name, case["number"], Options())
            convert(source, where / "one" / f"to-{to}", to, Options())
    converted = {"converted": "cases.json"}
    return run_layouts(where, "megatron_models.py", ONE, converted, iterations=20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", SOURCES)
def test_a_converted_model_is_loaded_bit_for_bit(ran: Wrong, to: str, kind: str) -> None:
    assert ran[kind, "one", f"from {to}"] == []
