"""Files of a Hugging Face model, made without `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_flashckpt.convert.hugging_face.architectures import model_of
from megatron_flashckpt.convert.hugging_face.hf_config import read_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 90,
}
FILE = "model.safetensors"


def make_model(directory: Path, **changes: Any) -> Path:
    """Write a model of random bfloat16 weights in one file; return its directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    generator = torch.Generator().manual_seed(1)
    save_file(
        {
            part.name: torch.randn(part.shape, generator=generator).to(torch.bfloat16)
            for match in model_of(read_config(directory)).matches()
            for part in match.parts
        },
        directory / FILE,
    )
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in all files of a model by name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors
