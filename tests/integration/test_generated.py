"""Every model that passes the self-check can be loaded: models of unusual shapes and types.

Real Megatron wraps and steps each model. One rank, two replicas and two stages save it. New
processes load it under the same layout and the next one, and the saving processes load it from
memory; all state is compared bit for bit. Models that we cannot save must be refused before the
first step.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.layout_jobs import Wrong, run_layouts, sources

#: Layouts: name -> ranks, flags.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "replicas": (2, []),
    "stages": (2, ["--pipeline-model-parallel-size", "2"]),
}
BF16, FP32 = "bfloat16", "float32"
Model = dict[str, Any]
"""A case in the form that `tests/support/jobs/generated_models.py` reads."""


def entry(shape: list[int], *dtypes: str, **more: Any) -> dict[str, Any]:
    """Return a parameter or buffer, with one type for each layer that has the entry."""
    return {"shape": shape, "dtypes": list(dtypes), **more}


def model(name: str, optimizer: str, **more: Any) -> Model:
    """Return a model with the given entries and one trained weight in addition."""
    case = {"name": name, "optimizer": optimizer, "count": 0, "layers": {}, "tied": [], **more}
    case["single"] = {"weight": entry([3, 4], FP32), **more.get("single", {})}
    return case


MIXED_LAYERS = {
    "norm": entry([5], FP32, BF16, BF16),
    "matrix": entry([3, 4], BF16, FP32, BF16, frozen=[False, False, True]),
    "bias": entry([2], BF16, BF16, BF16),
    "counts": entry([3], "int64", "float32", "bool", buffer=True),
}
ODD_SHAPES = {
    "scalar": entry([], FP32),
    "scalar16": entry([], BF16),
    "one": entry([1], BF16),
    "none": entry([0], FP32),
    "none16": entry([2, 0, 3], BF16),
    "odd": entry([7, 13], BF16),
    "no_buffer": entry([0, 2], FP32, buffer=True),
    "count": entry([], "int64", buffer=True),
}
NOT_CONTIGUOUS = {
    "turned": entry([5, 3], FP32, transposed=True),
    "turned16": entry([2, 3, 4], BF16, transposed=True),
    "gaps": entry([6], BF16, strided=True),
    "one_of_two": entry([1, 1], FP32, strided=True),
    "turned_buffer": entry([4, 2], FP32, buffer=True, transposed=True),
    "gaps_buffer": entry([1], "int64", buffer=True, strided=True),
}
IDLE = {
    "frozen": entry([3], BF16, frozen=[True]),
    "frozen_turned": entry([2, 3], FP32, frozen=[True], transposed=True),
    "unused": entry([4], BF16, unused=True),
    "embedding": entry([6, 2], BF16),
    "output": entry([6, 2], BF16),
}
MODELS: list[Model] = [
    *(
        model(
            optimizer,
            optimizer,
            count=3,
            layers=MIXED_LAYERS,
            single=ODD_SHAPES | NOT_CONTIGUOUS | IDLE,
            tied=[["embedding", "output"]],
            thawed=True,
        )
        for optimizer in ("fp32", "fp32 distributed", "bf16", "bf16 distributed")
    ),
    # Optimizer states have the types of their parameters.
    model("sgd", "fp32 sgd", count=3, layers=MIXED_LAYERS, single={"whole": entry([9], BF16)}),
    # Masters replace the 16-bit weights in a save. Layer 0 has an fp32 weight under the same key;
    # frozen weights have no masters. Layer 2 is on another stage than layers that train.
    model(
        "derived",
        "bf16 distributed",
        count=3,
        layers={
            "norm": entry([5], FP32, BF16, BF16),
            "shared": entry([3, 4], BF16, BF16, BF16, frozen=[False, False, True]),
        },
        single=IDLE,
        config={"weights": "derive"},
    ),
]
#: Models that must be refused before the first step, and patterns of the refusal.
REFUSED: list[tuple[Model, str]] = [
    (
        model(
            "expanded buffer",
            "bf16",
            single={"mask": entry([4, 3], FP32, buffer=True, expanded=True)},
        ),
        r"single\.mask: elements of this tensor share memory \(shape \(4, 3\), strides \(0, 0\)\)",
    ),
    (
        model("complex buffer", "bf16", single={"phase": entry([4], "complex64", buffer=True)}),
        r"single\.phase: torch\.complex64 cannot be stored",
    ),
]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generated")


@pytest.fixture(scope="module")
def ran(where: Path) -> Wrong:
    every_model = [*MODELS, *(made for made, _ in REFUSED)]
    numbered = [{**made, "number": number} for number, made in enumerate(every_model, 1)]
    (where / "all.json").write_text(json.dumps(numbered))
    (where / "accepted.json").write_text(json.dumps(numbered[: len(MODELS)]))
    cases = {"save": "all.json", "load": "accepted.json"}
    return run_layouts(where, "generated_models.py", LAYOUTS, cases, iterations=10)


@pytest.mark.parametrize("made", MODELS, ids=lambda made: made["name"])
def test_an_accepted_model_is_loaded_bit_for_bit(ran: Wrong, where: Path, made: Model) -> None:
    """Masters that a checkpoint lacks are made from the loaded weights (`thawed`).

    Else the next step would replace the loaded weights by those of the new model.
    """
    for layout, saved_by in sources(LAYOUTS).items():
        events = ["saved", "from memory", *(f"from {name}" for name in saved_by)]
        events += [f"thawed {name}" for name in saved_by if made.get("thawed")]
        differences = {event: ran.get((made["name"], layout, event)) for event in events}
        assert (made["name"], layout, "refused") not in ran
        assert differences == {event: [] for event in events}, layout
        stored = open_checkpoint(PosixStore(where / layout / "save"), 1 + MODELS.index(made))
        assert verify(stored) == []


@pytest.mark.parametrize(("made", "message"), REFUSED, ids=[made["name"] for made, _ in REFUSED])
def test_a_model_that_cannot_be_loaded_is_refused_before_the_first_step(
    ran: Wrong, made: Model, message: str
) -> None:
    for layout in LAYOUTS:
        assert (made["name"], layout, "saved") not in ran
        assert re.search(message, ran[made["name"], layout, "refused"][0])
