"""Training that begins with a Hugging Face model, which comes back unchanged if nothing is learned.

The command converts a model that the real `transformers` saved. Real Megatron starts from the
result on two tensor parallel ranks and trains with a learning rate of zero. What it saves is
converted back, and every tensor must be the one of the beginning, bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_flashckpt.cli import main
from tests.convert import hf_models
from tests.convert.hf_files import weights
from tests.support.megatron_jobs import run_job, succeeded

CONFIG = {
    "activation_function": "gelu",
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 32,
    "vocab_size": 501,  # of the jobs' tokenizer
}
FLAGS = (
    "--num-layers 2 --bf16 --tensor-model-parallel-size 2 --train-iters 1 --save-interval 1 "
    "--lr 0 --min-lr 0 --finetune --ckpt-format torch_dist"
).split()


def converted(source: Path, destination: Path, *options: str) -> Path:
    assert main(["convert", str(source), str(destination), *options]) == 0
    return destination


@pytest.mark.parametrize(("to", "entry_point"), [("flashckpt", "launch"), ("torch_dist", "stock")])
def test_a_model_comes_back_bit_for_bit_after_training_with_rate_zero(
    tmp_path: Path, to: str, entry_point: str
) -> None:
    template = hf_models.write_template(tmp_path / "template", CONFIG)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(template), dtype=torch.bfloat16
    )
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.05)
    model.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    start = converted(tmp_path / "hf", tmp_path / "start", "--from", "hf", "--to", to)
    flags = [*FLAGS, "--load", str(start), "--save", str(tmp_path / "saved")]
    done = succeeded(run_job(tmp_path, "job", flags, ranks=2, entry_point=entry_point))
    assert sorted(done.losses()) == [1]
    back = converted(
        *(tmp_path / "saved", tmp_path / "back"), "--to", "hf", "--hf-config", str(template)
    )
    original, result = weights(tmp_path / "hf"), weights(back)
    assert len(original) == 28
    assert result.keys() == original.keys()
    for name, tensor in original.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name], tensor), name
    assert json.loads((back / "config.json").read_text()) == CONFIG
