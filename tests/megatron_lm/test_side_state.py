"""What modules keep beside tensors is found by Megatron's names for it."""

from __future__ import annotations

from typing import Any

import torch

from megatron_flashckpt.megatron_lm.geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.side_state import extra_states, load_extra_states


class Keeper(torch.nn.Linear):
    """As TransformerEngine's modules do, it keeps something that is no tensor."""

    def __init__(self, kept: str) -> None:
        super().__init__(1, 1)
        self.kept = kept

    def get_extra_state(self) -> str:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def chunk(kept: str) -> torch.nn.Module:
    layers = [torch.nn.ModuleDict({"fc": Keeper(f"{kept} {n}")}) for n in range(2)]
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers), "norm": torch.nn.Identity()})


def geometry() -> ModelGeometry:
    objects = [
        (number, f"layers.{n}.fc._extra_state", f"layers.fc._extra_state/{2 * number + n}")
        for number in range(2)
        for n in range(2)
    ]
    # What Megatron lists for modules that have none, or that are no modules.
    objects += [(0, "norm._extra_state", "norm"), (0, "layers.9.fc._extra_state", "gone")]
    objects += [(1, "layers.0.fc.other", "other"), (1, "_extra_state", "chunk")]
    return ModelGeometry((), [], [], objects)


def test_extra_states_go_by_global_names_and_come_back() -> None:
    chunks = [chunk("first"), chunk("second")]
    found = extra_states(chunks, geometry())
    assert found == {
        "layers.fc._extra_state/0": "first 0",
        "layers.fc._extra_state/1": "first 1",
        "layers.fc._extra_state/2": "second 0",
        "layers.fc._extra_state/3": "second 1",
    }
    others = [chunk("third"), chunk("fourth")]
    load_extra_states(others, geometry(), found)
    assert extra_states(others, geometry()) == found


def test_a_chunk_may_itself_have_an_extra_state() -> None:
    only = ModelGeometry((), [], [], [(0, "_extra_state", "chunk")])
    assert extra_states([Keeper("whole")], only) == {"chunk": "whole"}
