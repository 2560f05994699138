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

import pytest

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.integration.generated import KNOWN, REFUSED, Model, drawn
from tests.support.layout_jobs import Wrong, run_layouts, sources

#: Layouts: name -> ranks, flags.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "replicas": (2, []),
    "stages": (2, ["--pipeline-model-parallel-size", "2"]),
}
MODELS: list[Model] = [*KNOWN, *map(drawn, range(4))]  # one for each optimizer
ALL = [*MODELS, *(made for made, _ in REFUSED)]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generated")


@pytest.fixture(scope="module")
def ran(where: Path) -> Wrong:
    numbered = [{**made, "number": number} for number, made in enumerate(ALL, 1)]
    (where / "all.json").write_text(json.dumps(numbered))
    (where / "accepted.json").write_text(json.dumps(numbered[: len(MODELS)]))
    cases = {"save": "all.json", "load": "accepted.json"}
    return run_layouts(where, "generated_models.py", LAYOUTS, cases, iterations=10)


@pytest.mark.parametrize("made", MODELS, ids=lambda made: made["name"])
def test_an_accepted_model_is_loaded_bit_for_bit(ran: Wrong, made: Model) -> None:
    for layout, saved_by in sources(LAYOUTS).items():
        events = ["saved", "from memory", *(f"from {name}" for name in saved_by)]
        differences = {event: ran.get((made["name"], layout, event)) for event in events}
        assert (made["name"], layout, "refused") not in ran
        assert differences == {event: [] for event in events}, layout


@pytest.mark.parametrize(
    "made", [made for made in MODELS if made.get("thawed")], ids=lambda made: made["name"]
)
def test_masters_that_a_checkpoint_lacks_are_made_from_the_loaded_weights(
    ran: Wrong, made: Model
) -> None:
    """Else the next step would replace the loaded weights by those of the new model."""
    for layout, saved_by in sources(LAYOUTS).items():
        for name in saved_by:
            assert ran[made["name"], layout, f"thawed {name}"] == []


@pytest.mark.parametrize("made", MODELS, ids=lambda made: made["name"])
def test_the_checkpoint_of_an_accepted_model_is_verified(
    ran: Wrong, where: Path, made: Model
) -> None:
    iteration = 1 + MODELS.index(made)
    for layout in LAYOUTS:
        assert verify(open_checkpoint(PosixStore(where / layout / "save"), iteration)) == []


@pytest.mark.parametrize(("made", "message"), REFUSED, ids=[made["name"] for made, _ in REFUSED])
def test_a_model_that_cannot_be_loaded_is_refused_before_the_first_step(
    ran: Wrong, made: Model, message: str
) -> None:
    for layout in LAYOUTS:
        assert (made["name"], layout, "saved") not in ran
        assert re.search(message, ran[made["name"], layout, "refused"][0])


def test_megatron_does_not_save_layers_of_several_types_as_torch_dist(ran: Wrong) -> None:
    """Such models therefore cannot be converted to that format."""
    (error,) = ran[KNOWN[0]["name"], "one", "torch_dist"]
    assert error.startswith("AssertionError((torch.")
