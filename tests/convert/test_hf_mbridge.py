"""Exported tensors compared with those that mbridge makes of the same model.

mbridge is another project, with tables of its own. It is no dependency of the tests: `pip install
--no-deps mbridge==0.15.1` in the environment of the tests lets them run.
"""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from megatron_flashckpt.convert.common.named_regions import named_regions
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.hugging_face.architectures import model_of
from megatron_flashckpt.convert.hugging_face.hf_config import read_config
from megatron_flashckpt.convert.writers.hf import write_hf
from tests.convert import hf_models
from tests.convert.hf_models import CASES

pytest.importorskip("mbridge", reason="an oracle that is not among the packages of the tests")

from mbridge.core.auto_bridge import _MODEL_REGISTRY

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


#: Models that mbridge does not have.
OTHERS = ("gpt2", "gpt2-exact-gelu", "qwen3-moe-dense-layer-unnormalized")


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHERS])
def test_mbridge_makes_the_same_tensors_of_the_same_model(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    template = hf_models.write_template(tmp_path / "template", case.config)
    args = hf_models.megatron_args(case.flags)
    with hf_models.one_rank():
        contents = hf_models.contents_of(hf_models.megatron_model(args), args)
    write_hf(contents, tmp_path / "hf", Options(hf_config=template))
    written = load_file(tmp_path / "hf/model-00001-of-00001.safetensors")
    bridge_class = _MODEL_REGISTRY[case.config["model_type"]]
    bridge = bridge_class.__new__(bridge_class)
    bridge.hf_config = AutoConfig.from_pretrained(template)
    if getattr(bridge.hf_config, "head_dim", None) is None:  # which mbridge takes for a number
        bridge.hf_config.head_dim = args.kv_channels
    bridge.config = types.SimpleNamespace(mtp_num_layers=None)
    bridge.make_vocab_size_divisible_by = 1
    bridge.vocab_size, bridge.padded_vocab_size = hf_models.WORDS, hf_models.PADDED
    regions = {region.name: region for region in named_regions(contents.tensors)}
    compared: set[str] = set()
    for match in model_of(read_config(template)).matches():
        (region,) = (regions[local] for local in match.names if local in regions)
        # mbridge names experts as grouped GEMM does.
        engine = _EXPERT.sub(lambda found: f".{found[2]}.weight{found[1]}", match.names[0])
        for hf_name, tensor in zip(
            *bridge._weight_to_hf_format(engine, region.read()), strict=True
        ):
            compared.add(hf_name)
            assert torch.equal(written[hf_name], tensor), hf_name
    assert compared == written.keys()
