"""Hugging Face models made from Megatron's, and computed with the real `transformers`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import open_source
from megatron_flashckpt.convert.writers.hf import write_hf
from tests.convert import hf_models, made, rebuilt
from tests.convert.hf_files import weights
from tests.convert.hf_models import CASES, Case

#: Two float32 computations of the same model differ by less, in units of the largest logit. A
#: tensor that is moved by one element differs by more.
TOLERANCE = 2e-5


@dataclasses.dataclass
class Exported:
    """A model of Megatron and what was written of it."""

    case: Case
    contents: Contents
    logits: torch.Tensor
    directory: Path
    state: dict[str, torch.Tensor]
    """Tensors of the written files by name."""

    def hf_logits(self, state: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return what `transformers` computes from the directory, or from another state."""
        source: dict[str, Any] = {"pretrained_model_name_or_path": self.directory}
        if state is not None:
            config = AutoConfig.from_pretrained(self.directory)
            source = {"pretrained_model_name_or_path": None, "config": config, "state_dict": state}
            model_class = getattr(__import__("transformers"), config.architectures[0])
        else:
            model_class = AutoModelForCausalLM
        model, info = model_class.from_pretrained(
            **source, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(info.values()), info
        with torch.no_grad():
            return model.eval()(hf_models.tokens()).logits


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    case = CASES[request.param]
    where = tmp_path_factory.mktemp(request.param)
    template = hf_models.write_template(where / "template", case.config)
    args = hf_models.megatron_args(case.flags)
    with hf_models.one_rank():
        try:
            model = hf_models.megatron_model(args)
        except ValueError as error:
            if "q_lora_rank is None" not in str(error):
                raise
            pytest.skip(f"core 0.19 needs Transformer Engine for it: {error}")
        logits = hf_models.megatron_logits(model)
        contents = hf_models.contents_of(model, args)
    write_hf(contents, where / "hf", Options(hf_config=template, shard_nbytes=20_000))
    return Exported(case, contents, logits, where / "hf", weights(where / "hf"))


def test_the_exported_model_computes_the_logits_of_megatrons(exported: Exported) -> None:
    assert distance(exported.hf_logits(), exported.logits) < TOLERANCE
    written = exported.directory
    assert json.loads((written / "config.json").read_text()) == exported.case.config
    assert json.loads((written / "tokenizer.json").read_text()) == {"of": "the template"}


def test_a_tensor_moved_by_one_element_changes_the_logits(exported: Exported) -> None:
    """Shows that the comparison of logits checks the place of every kind of tensor's elements."""
    kinds = {re.sub(r"\d+", "N", name): name for name in exported.state}
    for name in kinds.values():
        tensor = exported.state[name]
        moved = tensor.reshape(-1).roll(1).view(tensor.shape)
        logits = exported.hf_logits({**exported.state, name: moved})
        assert distance(logits, exported.logits) > 10 * TOLERANCE, name


def test_a_written_model_read_again_is_megatrons_bit_for_bit(exported: Exported) -> None:
    """Padding is not in the model, so it comes back as zeros, up to Megatron's default multiple."""
    options = Options(hf_config=exported.directory)
    tensors = {t.name: t for t in open_source(exported.directory, None, options).contents.tensors}
    renamed = exported.case.renamed
    original = {
        f"{tensor.kind}/{renamed.get(tensor.key, tensor.key)}": tensor
        for tensor in exported.contents.tensors
    }
    assert tensors.keys() == original.keys()
    for name, tensor in original.items():
        expected, back = made.whole(tensor), made.whole(tensors[name])
        assert back.dtype == expected.dtype
        if tensor.key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert back.shape == (128, *expected.shape[1:])
            assert not back[hf_models.WORDS :].any()
            back, expected = back[: hf_models.WORDS], expected[: hf_models.WORDS]
        assert torch.equal(back, expected), tensor.name


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe-dense-layer-unnormalized"])
def test_layers_of_transformer_engine_have_the_keys_that_the_reader_gives(
    tmp_path: Path, name: str
) -> None:
    """Grouped GEMM has the keys of single experts, so one table serves both."""
    args = hf_models.megatron_args(CASES[name].flags)
    args.transformer_impl, args.moe_grouped_gemm = "transformer_engine", True
    original = [t for t in rebuilt.contents(args).tensors if t.kind in ("weight", "buffer")]
    contents = dataclasses.replace(rebuilt.contents(args), tensors=original)
    template = hf_models.write_template(tmp_path / "template", CASES[name].config)
    write_hf(contents, tmp_path / "hf", Options(hf_config=template))
    back = open_source(tmp_path / "hf", None, Options()).contents.tensors
    assert {t.key: t.shape[-1:] for t in back} == {t.key: t.shape[-1:] for t in original}
    of_words = ("embedding.word_embeddings.weight", "output_layer.weight")
    same = [[t for t in tensors if t.key not in of_words] for tensors in (original, back)]
    assert made.differing(*same) == []
