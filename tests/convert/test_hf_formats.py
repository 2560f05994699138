"""A Hugging Face model in each format, and from there again a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from tests.convert.hf_files import make_model, weights
from tests.convert.made import differing
from tests.support.megatron_jobs import same

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
    assert same(weights(tmp_path / "back"), weights(model))
