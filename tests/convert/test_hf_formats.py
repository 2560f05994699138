"""A Hugging Face model in each format, and from there again a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from tests.convert.hf_files import FILE, make_model
from tests.convert.made import differing

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 24,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 16,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
    },
}


@pytest.mark.parametrize("to", ["flashckpt", "torch_dist", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_for_bit_from_every_format(
    tmp_path: Path, name: str, to: str
) -> None:
    """The legacy format has the shapes of Megatron's model as Megatron itself pads it."""
    model = make_model(tmp_path / "model", **MODELS[name])
    source = open_source(model, None, Options())
    convert(source, tmp_path / "save", to, Options())
    stored = open_source(tmp_path / "save", None, Options(weights_only=True))
    assert differing(source.contents.tensors, stored.contents.tensors) == []
    convert(stored, tmp_path / "back", "hf", Options(hf_config=model))
    back = load_file(tmp_path / "back/model-00001-of-00001.safetensors")
    original = load_file(model / FILE)
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in original.items())
