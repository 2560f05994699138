"""Hugging Face models and templates that are refused before anything is written."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.safetensors_files import INDEX
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    FlashCkptError,
    NotCommittedError,
    UnsupportedError,
)
from tests.convert.hf_files import CONFIG, FILE, make_model, weights
from tests.convert.made import held, whole
from tests.support.megatron_jobs import same

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 4,
    "moe_intermediate_size": 4,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "topk_group": 2,
    "v_head_dim": 2,
}
#: Megatron's argument of a model whose output layer is a tensor of its own.
UNTIED = "untie_embeddings_and_output_weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def write(
    opened_from: Path,
    tmp_path: Path,
    template: Path,
    change: Callable[[Contents], Contents] = lambda contents: contents,
) -> None:
    """Write a changed model with `template`, and require that an error leaves nothing."""
    opened = open_source(opened_from, None, Options())
    opened = dataclasses.replace(opened, contents=change(opened.contents))
    before = sorted(tmp_path.rglob("*"))
    try:
        convert(opened, tmp_path / "result", "hf", Options(hf_config=template))
    except FlashCkptError:
        assert sorted(tmp_path.rglob("*")) == before
        raise


#: Changes of a config, and the reason for which Megatron has no such model.
NO_COUNTERPART: list[tuple[Any, str]] = [
    (DEEPSEEK | {"attention_bias": True}, "attention_bias is true"),
    (DEEPSEEK | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
    (DEEPSEEK | {"num_experts_per_tok": 6}, "num_experts_per_tok is 6 and topk_group is 2"),
    (DEEPSEEK | {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling has "),
    ({"architectures": ["MambaForCausalLM"]}, 'architectures is \\["MambaForCausalLM"\\]'),
    ({"architectures": None}, "architectures is "),
    ({"quantization_config": {"bits": 4}}, "has a quantization_config"),
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu", and only "silu"'),
    ({"mlp_bias": True}, "mlp_bias is true"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and only 1 converts"),
    ({"use_sliding_window": True}, "use_sliding_window is true"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, 'embeddings of type "linear"'),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling has "),
]
#: The same of configs that are not complete; text is the whole file, and None is no file.
INCOMPLETE: list[tuple[Any, str]] = [
    ({"hidden_size": "8"}, 'hidden_size is "8", expected a positive int'),
    ({"vocab_size": None}, "vocab_size is null, expected a positive int"),
    ({"rope_theta": 0.5}, "rope_theta is 0.5, expected a whole number"),
    ({"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
    ("", "is not JSON"),
    ("[]", "is not a JSON object"),
    (None, r"config\.json: does not exist; give a directory"),
]


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        *((UnsupportedError, *row) for row in NO_COUNTERPART),
        *((ConfigError, *row) for row in INCOMPLETE),
    ],
)
def test_a_template_that_is_not_complete_or_has_no_counterpart_in_megatron_is_refused(
    tmp_path: Path, model: Path, error: type[FlashCkptError], changes: Any, message: str
) -> None:
    template = tmp_path / "template"
    template.mkdir()
    if changes is not None:
        text = changes if isinstance(changes, str) else json.dumps(CONFIG | changes)
        (template / "config.json").write_text(text)
    with pytest.raises(error, match=message):
        write(model, tmp_path, template)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "missing tensors: decoder.layers.2.*fc2.weight; nothing"),
        ({"num_hidden_layers": 1}, "model does not have: decoder.layers.1.*"),
        ({"intermediate_size": 13}, r"linear_fc1\.weight has \(24, 8\), expected \(26, 8\)"),
        ({"vocab_size": 129}, r"word_embeddings\.weight has \(128, 8\), expected \(129, 8\)"),
        ({"tie_word_embeddings": True}, f"{UNTIED} is True, expected False"),
    ],
)
def test_tensors_that_the_template_does_not_describe_are_refused(
    tmp_path: Path, model: Path, changes: dict[str, Any], message: str
) -> None:
    template = make_model(tmp_path / "template", **changes)
    with pytest.raises(UnsupportedError, match=message):
        write(model, tmp_path, template)
    if "tie_word_embeddings" in changes:
        with pytest.raises(UnsupportedError, match=r"does not have: output_layer\.weight"):
            write(model, tmp_path, template, without(UNTIED))


def without(name: str) -> Callable[[Contents], Contents]:
    """Return a function that makes the contents those of a release without an argument."""

    def change(contents: Contents) -> Contents:
        args = argparse.Namespace(**vars(contents.args))
        delattr(args, name)
        return dataclasses.replace(contents, common={**contents.common, "args": args})

    return change


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("rotary_base", 500000),
        ("norm_epsilon", 1e-6),
        ("num_query_groups", 1),
        ("qk_layernorm", True),
        ("swiglu", False),
        ("layernorm_zero_centered_gamma", True),
        ("rotary_interleaved", True),
        ("use_rope_scaling", True),
        ("mtp_num_layers", 1),
        ("multi_latent_attention", True),
    ],
)
def test_a_job_with_arguments_of_another_model_is_refused(
    tmp_path: Path, model: Path, argument: str, value: object
) -> None:
    """No shape shows these arguments, but the logits depend on them."""

    def change(contents: Contents) -> Contents:
        args = argparse.Namespace(**{**vars(contents.args), argument: value})
        return dataclasses.replace(contents, common={**contents.common, "args": args})

    with pytest.raises(UnsupportedError, match=f"{argument} is {value!r}, expected .*--hf-config"):
        write(model, tmp_path, model, change)
    write(model, tmp_path, model, without(argument))  # of a release without it


def changed_file(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(model / FILE)
    change(tensors)
    save_file(tensors, model / FILE)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing tensors: model\.norm\.weight; nothing"),
        (lambda t: t.update(more=torch.ones(1)), "tensors that this model does not have: more;"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(9)}),
            r"model\.norm\.weight has \(9,\), expected \(8,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(12, 8)}),
            "have different types, and are one tensor in Megatron",
        ),
    ],
)
def test_a_model_with_other_tensors_than_its_config_is_refused(
    model: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        open_source(changed_file(model, change), None, Options())


def test_computed_tensors_and_second_copies_in_old_files_are_ignored(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tied", tie_word_embeddings=True)
    before = open_source(model, None, Options()).contents.tensors
    more = {
        "lm_head.weight": torch.ones(90, 8),
        "model.layers.0.rotary_emb.inv_freq": torch.ones(1),
    }
    changed_file(model, lambda tensors: tensors.update(more))
    after = open_source(model, None, Options()).contents.tensors
    assert [tensor.name for tensor in after] == [tensor.name for tensor in before]


def test_gpt2_is_read_as_it_was_published(tmp_path: Path) -> None:
    """Its files have neither the prefix of a model with a head nor only weights."""
    sizes = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 16}
    model = make_model(tmp_path / "gpt2", architectures=["GPT2LMHeadModel"], **sizes)
    expected = {t.key: whole(t) for t in open_source(model, None, Options()).contents.tensors}
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(model / FILE).items()
    }
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 16, 16)}, model / FILE)
    after = {t.key: whole(t) for t in open_source(model, None, Options()).contents.tensors}
    assert same(after, expected)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (FILE, lambda data: data[:-1], "ends before .* does; download"),
        (FILE, lambda data: b"\xff" * 8, "has no whole header"),
        (FILE, lambda data: data.replace(b"[0,", b"[1,"), "has wrong bytes for"),
        (FILE, lambda data: bytes([4, *bytes(7)]) + b"oops", "has a header that cannot be read"),
        (
            *(INDEX, lambda _: b'{"weight_map": {"a": "../model/model.safetensors"}}'),
            "names the file '../model/model.safetensors', which is not in the directory",
        ),
        (
            *(INDEX, lambda _: b'{"weight_map": {"a": "model-2.safetensors"}}'),
            "names the file 'model-2.safetensors'",
        ),
        (INDEX, lambda _: b"[]", "is no list of files"),
    ],
    ids=["cut", "no header", "false offsets", "not JSON", "outside", "missing", "list as index"],
)
def test_a_damaged_model_is_refused(
    model: Path, file: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    (model / file).write_bytes(damage((model / FILE).read_bytes()))
    with pytest.raises(CorruptCheckpointError, match=message):
        open_source(model, None, Options())


def test_a_missing_template_or_model_and_an_iteration_are_refused(
    tmp_path: Path, model: Path
) -> None:
    with pytest.raises(ConfigError, match="--hf-config DIR"):
        convert(open_source(model, None, Options()), tmp_path / "result", "hf", Options())
    assert not (tmp_path / "result").exists()
    with pytest.raises(ConfigError, match="leave out --iteration 3"):
        open_source(model, 3, Options())
    (model / FILE).rename(model / "pytorch_model.bin")
    with pytest.raises(NotCommittedError, match="save_pretrained"):
        open_source(model, None, Options())


def test_files_of_the_template_are_copied_except_for_its_weights(
    tmp_path: Path, model: Path
) -> None:
    (model / "tokenizer.model").write_bytes(b"words")
    (model / "pytorch_model.bin").write_bytes(b"weights")
    (model / "pytorch_model.bin.index.json").write_bytes(b"{}")
    (model / "original").mkdir()
    write(model, tmp_path, model)
    names = {path.name for path in (tmp_path / "result").iterdir() if path.name[0] != "."}
    assert names == {"config.json", "tokenizer.model", INDEX, "model-00001-of-00001.safetensors"}
    assert (tmp_path / "result/tokenizer.model").read_bytes() == b"words"


def test_padding_is_cut_and_other_rows_are_kept(tmp_path: Path, model: Path) -> None:
    def filled(tensor: GlobalTensor) -> GlobalTensor:
        value = whole(tensor)
        value[90:] = 7.0
        return held(tensor.key, tensor.kind, value, tensor.boxes)

    def change(contents: Contents) -> Contents:
        padded = ("embedding.word_embeddings.weight", "output_layer.weight")
        tensors = [filled(t) if t.key in padded else t for t in contents.tensors]
        assert all(t.shape[0] == 128 for t in tensors if t.key in padded)
        return dataclasses.replace(contents, tensors=tensors)

    write(model, tmp_path, model, change)
    assert same(weights(tmp_path / "result"), weights(model))
