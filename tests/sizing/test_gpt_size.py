"""Sizes computed from arguments, compared with Megatron's own models in one process."""

from __future__ import annotations

import re

import pytest

from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.megatron_lm.rebuild.model import rank_models
from megatron_flashckpt.sizing import gpt_size
from tests.convert.rebuilt import arguments

UNTIED = {"untie_embeddings_and_output_weights": True, "swiglu": True}
GROUPED = {
    "normalization": "RMSNorm",
    "group_query_attention": True,
    "num_query_groups": 4,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "ffn_hidden_size": None,
}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "disable_bias_linear": True,
    "swiglu": True,
    "moe_ffn_hidden_size": 16,
}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
CASES = {
    "tied-tp2-pp2": {**TP2, **PP2},
    "untied-swiglu-tp2-pp4": {**UNTIED, **TP2, "pipeline_model_parallel_size": 4},
    "grouped-tp4": {**GROUPED, "ffn_hidden_size": 64, "tensor_model_parallel_size": 4},
    "no-bias": {"disable_bias_linear": True, "add_qkv_bias": True, "swiglu": True, **TP2},
    "first-stage": {**PP2, "decoder_first_pipeline_num_layers": 1},
    "experts-tp2-ep2": {**EXPERTS, **TP2, **EP2, "sequence_parallel": True},
    "experts-etp1": {
        **(EXPERTS | TP2 | EP2),
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    },
    "shared-expert": {**EXPERTS, **TP2, "moe_shared_expert_intermediate_size": 32},
    "quick-geglu": {"quick_geglu": True, **TP2},
    "rotary": {"use_rotary_position_embeddings": True},
    "embedding-and-loss-as-layers": {
        **PP2,
        "num_layers": 6,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
        "num_layers_per_virtual_pipeline_stage": 2,
        **VPP2,
    },
    "layout": {**PP2, **VPP2, "num_layers": 7, "pipeline_model_parallel_layout": "Et|(t|)*2,t*4L"},
    "first-stage-interleaved": {
        **PP2,
        **VPP2,
        "num_layers": 6,
        "decoder_first_pipeline_num_layers": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    # The second stage has all layers with experts.
    "experts-every-other-interleaved": {
        **EXPERTS,
        **PP2,
        **VPP2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "moe_layer_freq": "([0,1]*2)",
    },
}


def words_of(changes: dict) -> list[str]:
    """Return the command line of a job that has the arguments `arguments(**changes)`."""
    words = []
    for name, value in vars(arguments(**changes)).items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value not in (None, False):
            words += [option, str(value)]
    return words


@pytest.mark.parametrize("name", CASES)
def test_every_rank_writes_the_number_of_parameters_of_its_model(name: str) -> None:
    changes = CASES[name]
    real = {**changes}
    if "disable_bias_linear" in real:
        real["add_bias_linear"] = not real.pop("disable_bias_linear")
    if "moe_layer_freq" in real:
        real["moe_layer_freq"] = [0, 1, 0, 1]
    if "use_rotary_position_embeddings" in real:
        real["position_embedding_type"] = "rope"
    stages = gpt_size.stages(gpt_size.parse(words_of(changes)))
    models = rank_models(arguments(**real))
    assert len({model.pp for model in models}) == len(stages)
    for model in models:
        part = stages[model.pp]
        saved = [p for chunk in model.chunks for p in chunk.parameters if p.geometry.is_saved]
        assert sum(p.numel for p in saved) == part.numel, (model.tp, model.pp)
        if changes.get("expert_model_parallel_size", 1) > 1:
            assert sum(p.numel for p in saved if p.expert) == part.experts
        parameters = [p for chunk in model.chunks for p in chunk.parameters]
        assert len(parameters) >= part.tensors


def test_defaults_are_megatron_s() -> None:
    words = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --swiglu".split()
    args = gpt_size.parse([*words, "--vocab-size", "500", "--tokenizer-type", "NullTokenizer"])
    assert gpt_size.padded_vocabulary(args) == 512
    # The MLP is int(4 * 128 * 2 / 3 / 64) * 64 wide.
    assert gpt_size._ffn(args) == 320


AWARE = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("words", "nbytes"),
    [
        ("--bf16", 2 + 4 + 8),
        ("", 4 + 8),
        ("--fp16 --optimizer sgd", 2 + 4 + 4),
        ("--fp16 --optimizer sgd --sgd-momentum 0", 2 + 4),
        ("--bf16 --optimizer lion", 2 + 4 + 4),
        ("--bf16 --no-save-optim", 2),
        ("--bf16 --use-precision-aware-optimizer --main-params-dtype fp16", 2 + 2 + 8),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
            2 + 2 + 2 + 1,
        ),
        ("--bf16 --use-precision-aware-optimizer --fp8-recipe mxfp8", 2 + 4 + 8),
        ("--bf16 --use-precision-aware-optimizer --optimizer-cpu-offload", 2 + 4 + 8),
        ("--fp16 --use-precision-aware-optimizer", 2 + 4 + 8),
    ],
)
def test_bytes_per_parameter_follow_from_the_arguments(words: str, nbytes: int) -> None:
    args = gpt_size.parse(words.split(), model_known=True)
    assert gpt_size.parameter_nbytes(args) == nbytes


@pytest.mark.parametrize(
    ("words", "nbytes"),
    [
        ("--bf16 --use-distributed-optimizer", 2),
        ("", 0),
        ("--bf16 --no-save-optim", 0),
        (f"{AWARE} --main-params-dtype fp16", "needs fp32 masters"),
        (AWARE, "keeps only the low halves"),
    ],
)
def test_bytes_of_derived_weights_follow_from_the_arguments(words: str, nbytes: int | str) -> None:
    args = gpt_size.parse(words.split(), model_known=True)
    if isinstance(nbytes, int):
        assert gpt_size.derived_nbytes(args) == nbytes
    else:
        with pytest.raises(ConfigError, match=nbytes):
            gpt_size.derived_nbytes(args)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layers 4", "--hidden-size, --num-attention-heads, --padded-vocab-size"),
        ("--mtp-num-layers 1", "--mtp-num-layers cannot be computed; give --parameters"),
        ("--moe-latent-size 64", "--moe-latent-size cannot be computed; give --parameters"),
        ("--num-layers many", "cannot be read: argument --num-layers: 'many' is not a whole num"),
        ("--num-layers", "cannot be read: argument --num-layers: expected one argument"),
        ("--swiglu=yes", "cannot be read: argument --swiglu: ignored explicit argument 'yes'"),
    ],
)
def test_insufficient_arguments_are_refused_with_the_remedy(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        gpt_size.parse(words.split())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": "0"}, "argument --num-layers: '0' is not a whole number above 0"),
        ({"tensor_model_parallel_size": -2}, "argument --tensor-model-parallel-size: '-2' is not"),
        ({**TP2, "num_attention_heads": 3}, "--num-attention-heads 3 cannot be divided by --tens"),
        ({"num_attention_heads": 5, "kv_channels": None}, "--hidden-size 24 cannot be divided by"),
        ({**EXPERTS, "expert_model_parallel_size": 3}, "--num-experts 4 cannot be divided by"),
        ({**EXPERTS, "moe_layer_freq": "0"}, "--moe-layer-freq 0: is neither a number nor a list"),
        ({**EXPERTS, "moe_layer_freq": "x"}, "--moe-layer-freq x: is neither a number nor a list"),
        # Patterns are parsed and never executed.
        *(
            ({**EXPERTS, "moe_layer_freq": f"[]+{pattern}"}, "--moe-layer-freq")
            for pattern in ("[0", "[0]*x", "7*7", "[0]*9999999999", "__import__('os')")
        ),
        ({**PP2, "decoder_first_pipeline_num_layers": 9}, "cannot be divided over 2 pipeline"),
        (
            {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2},
            "cannot be divided over 1 pipeline",
        ),
        ({**PP2, "num_layers_per_virtual_pipeline_stage": 3}, "cannot be divided over 2 pipeline"),
        ({"pipeline_model_parallel_size": 3}, "cannot be divided over 3 pipeline"),
        ({**PP2, "pipeline_model_parallel_layout": "Et|tL"}, "Et|tL: is not a layout of 4 layers"),
        ({**PP2, "pipeline_model_parallel_layout": "Etttt|mL"}, "is not a layout of 4 layers"),
        ({**PP2, "pipeline_model_parallel_layout": "Et|tt|tL"}, "has 3 parts, which cannot be"),
        ({"pipeline_model_parallel_layout": f"E{'(t*9999)*9999'}L"}, "has too many layers"),
    ],
)
def test_numbers_that_no_job_has_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        gpt_size.stages(gpt_size.parse(words_of(changes)))
