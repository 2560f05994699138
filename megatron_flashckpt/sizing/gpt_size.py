"""Parameters that every rank of a Megatron GPT writes, computed from Megatron's own arguments.

The rules are those of Megatron-LM core 0.17 (`transformer_config.py`, `arguments.py`): tensors that
are sharded over the tensor parallel group, tensors that are replicated in it, and pipeline stages.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.sizing.pipeline import layers_of_stages

#: Longest layer pattern. `[1]*10**12` would fill the memory.
_MOST_LAYERS = 100_000
#: Largest number in Megatron's arguments.
_MOST = 10**12
#: Arguments of models that are not GPTs, whose sizes this module cannot compute.
_FOREIGN = (
    "--spec --multi-latent-attention --mtp-num-layers --hybrid-layer-pattern "
    "--hybrid-override-pattern --heterogeneous-layers-config-path "
    "--heterogeneous-layers-config-encoded-json --experimental-attention-variant "
    "--moe-shared-expert-gate --attention-output-gate "
    "--moe-latent-size"
).split()


class RankPart(NamedTuple):
    """Numbers of parameters in one rank's part of the model."""

    sharded: int
    """Parameters of tensors that are sharded over the tensor parallel group."""
    replicated: int
    """Parameters of tensors that all tensor ranks replicate; each writes its own copy."""
    experts: int
    """Parameters of routed experts, which have data parallel groups of their own."""
    tensors: int

    @property
    def numel(self) -> int:
        return self.sharded + self.replicated + self.experts


def _add(parts: Sequence[RankPart]) -> RankPart:
    return RankPart(*(sum(numbers) for numbers in zip(*parts, strict=True)))


class _Parser(argparse.ArgumentParser):
    """Parser of Megatron's arguments, whose errors are those of `flashckpt plan`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"Megatron's arguments after '--' cannot be read: {message}")


def _count(text: str) -> int:
    """Return a number of things, of which a job has at least one."""
    if not text.isdecimal() or not 0 < int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "vocab-size"):
        parser.add_argument(f"--{name}", type=_count)
    for name in (
        *("ffn-hidden-size", "kv-channels", "num-query-groups", "padded-vocab-size"),
        *("max-position-embeddings", "num-experts", "moe-ffn-hidden-size"),
        *("moe-shared-expert-intermediate-size", "expert-tensor-parallel-size"),
        *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        *("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"),
    ):
        parser.add_argument(f"--{name}", type=_count)
    for name in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{name}-model-parallel-size", type=_count, default=1)
    parser.add_argument("--make-vocab-size-divisible-by", type=_count, default=128)
    for name in ("tokenizer-type", "pipeline-model-parallel-layout", "logits-save-dir", "save"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--sgd-momentum", type=float, default=0.9)
    parser.add_argument("--tensor-parallel-num-weight-shards", type=_count, default=0)
    parser.add_argument("--expert-tensor-parallel-num-weight-shards", type=_count, default=0)
    parser.add_argument("--num-distributed-optimizer-instances", type=_count, default=1)
    parser.add_argument("--fp8-recipe", default="delayed")
    parser.add_argument("--vision-pretraining-type", default="classify")
    for name in ("main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"):
        parser.add_argument(f"--{name}", default="fp32")
    for name in (
        *("group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "bf16", "fp16"),
        *("disable-bias-linear", "add-qkv-bias", "qk-layernorm", "no-save-optim"),
        *("use-precision-aware-optimizer", "use-distributed-optimizer", "quick-geglu"),
        *("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"),
        "use-rotary-position-embeddings",
        # These do not change sizes; `served` refuses some of them.
        *("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2", "use-legacy-models"),
        *("fp8-param-gather", "fp4-param-gather", "no-load-optim", "finetune"),
        *("optimizer-cpu-offload", "moe-use-legacy-grouped-gemm", "vision-pretraining"),
        *("perform-rl-step", "offload-optimizer-states", "inprocess-restart", "freeze-all-layers"),
    ):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def parse(words: Sequence[str], *, model_known: bool = False) -> argparse.Namespace:
    """Return those of Megatron's arguments that determine sizes; others are ignored.

    Args:
        model_known: the number of parameters is given, so the model's arguments may be missing.

    Raises:
        ConfigError: a required argument is missing, or an argument makes a model of unknown size.
    """
    foreign = [name for name in _FOREIGN if name in {word.partition("=")[0] for word in words}]
    if foreign and not model_known:
        raise ConfigError(
            f"sizes of a model with {', '.join(foreign)} cannot be computed; give --parameters N"
        )
    args, _ = _parser().parse_known_args(list(words))
    # As Megatron derives them.
    tp = args.tensor_model_parallel_size
    etp = args.expert_tensor_parallel_size or tp
    args.gtp_weight_remat_size = args.tensor_parallel_num_weight_shards // tp
    args.expert_gtp_weight_remat_size = args.expert_tensor_parallel_num_weight_shards // etp
    needed = ("num_layers", "hidden_size", "num_attention_heads")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(args, name) is None]
    if args.vocab_size is None and args.padded_vocab_size is None:
        missing.append("--padded-vocab-size (or --vocab-size)")
    if missing and not model_known:
        raise ConfigError(
            f"the model's size is unknown: give {', '.join(missing)} after '--', as in the job's "
            "command line, or --parameters N"
        )
    if not missing:
        _refuse_indivisible(args)
    return args


def _refuse_indivisible(args: argparse.Namespace) -> None:
    """Raise ConfigError if a part of the model cannot be divided over its ranks."""
    tp, ep = "tensor_model_parallel_size", "expert_model_parallel_size"
    parts = [("num_attention_heads", tp), ("padded_vocab_size", tp), ("num_experts", ep)]
    if args.kv_channels is None:
        parts.append(("hidden_size", "num_attention_heads"))
    for part, ways in parts:
        number = getattr(args, part)
        if number is not None and number % getattr(args, ways):
            raise ConfigError(
                f"--{part.replace('_', '-')} {number} cannot be divided by "
                f"--{ways.replace('_', '-')} {getattr(args, ways)}"
            )


def padded_vocabulary(args: argparse.Namespace) -> int:
    """Return the rows of the embedding (`vocab_size_with_padding` of Megatron)."""
    if args.padded_vocab_size:
        return int(args.padded_vocab_size)
    size = args.vocab_size + (args.tokenizer_type == "NullTokenizer")
    step = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-size // step) * step)


def _is_moe(args: argparse.Namespace) -> list[bool]:
    """Return for each layer whether it has experts (`moe_layer_freq`: every n-th, or a pattern)."""
    if not args.num_experts:
        return [False] * args.num_layers
    # Megatron takes patterns as Python expressions: ([0]*3+[1]*58).
    frequency = args.moe_layer_freq
    pattern = [int(n) for n in _pattern(frequency)] if "[" in frequency else None
    if pattern is not None and len(pattern) != args.num_layers:
        raise ConfigError(
            f"--moe-layer-freq {frequency}: is not a list of {args.num_layers} layers"
        )
    if pattern is not None:
        return [bool(flag) for flag in pattern]
    if not frequency.isdecimal() or not int(frequency):
        raise ConfigError(f"--moe-layer-freq {frequency}: is neither a number nor a list")
    return [layer % int(frequency) == 0 for layer in range(args.num_layers)]


def _pattern(text: str) -> list[int]:
    """Return the value of an expression of lists, `+` and `*`, without executing it."""

    def value(node: ast.expr) -> list[int] | int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=elements):
                return [layers for element in elements if isinstance(layers := value(element), int)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                left_value, right_value = value(left), value(right)
                if isinstance(left_value, list) and isinstance(right_value, list):
                    return left_value + right_value
                if isinstance(left_value, int) and isinstance(right_value, int):
                    return left_value + right_value
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                left_value, right_value = value(left), value(right)
                if isinstance(left_value, int):
                    left_value, right_value = right_value, left_value
                if isinstance(left_value, int) and isinstance(right_value, int):
                    return left_value * right_value
                if isinstance(left_value, list) and isinstance(right_value, int):
                    if len(left_value) * right_value > _MOST_LAYERS:
                        raise ConfigError(
                            f"--moe-layer-freq {text}: has more than {_MOST_LAYERS} layers"
                        )
                    return left_value * right_value
        raise ConfigError(f"--moe-layer-freq {text}: is neither a number nor a list")

    try:
        layers = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        layers = 0
    if isinstance(layers, int):
        raise ConfigError(f"--moe-layer-freq {text}: is neither a number nor a list")
    return layers


def stages(args: argparse.Namespace) -> list[RankPart]:
    """Return a tensor rank's part of the model, by pipeline stage."""
    tp, hidden = args.tensor_model_parallel_size, args.hidden_size
    norm = 2 * hidden if args.normalization == "LayerNorm" else hidden
    norm_tensors = norm // hidden
    table = padded_vocabulary(args) * hidden // tp
    moe = _is_moe(args)
    stage_parts = []
    for stage, layers in enumerate(layers_of_stages(args)):
        parts = [_attention(args) for _ in layers]
        parts += [
            _experts(args) if moe[layer] else _linears(args, _ffn(args), tp) for layer in layers
        ]
        parts += [RankPart(0, 2 * norm, 0, 2 * norm_tensors) for _ in layers]
        if stage == 0:
            parts.append(RankPart(table, 0, 0, 1))
            learned = args.position_embedding_type == "learned_absolute"
            if learned and not args.use_rotary_position_embeddings:
                parts.append(RankPart(0, (args.max_position_embeddings or 0) * hidden, 0, 1))
        if stage == args.pipeline_model_parallel_size - 1:
            parts.append(RankPart(0, norm, 0, norm_tensors))
            if args.untie_embeddings_and_output_weights:
                parts.append(RankPart(table, 0, 0, 1))
        stage_parts.append(_add(parts))
    return stage_parts


def _attention(args: argparse.Namespace) -> RankPart:
    tp, hidden, heads = args.tensor_model_parallel_size, args.hidden_size, args.num_attention_heads
    channels = args.kv_channels or hidden // heads
    groups = (args.num_query_groups or 1) if args.group_query_attention else heads
    rows = (heads + 2 * groups) * channels
    bias = not args.disable_bias_linear
    qkv_bias = rows if bias or args.add_qkv_bias else 0
    sharded = rows * hidden + qkv_bias + heads * channels * hidden
    replicated = hidden if bias else 0
    tensors = 2 + bool(qkv_bias) + bias
    if args.qk_layernorm:
        per_norm = 2 if args.normalization == "LayerNorm" else 1
        replicated += 2 * per_norm * channels
        tensors += 2 * per_norm
    return RankPart(sharded // tp, replicated, 0, tensors)


def _ffn(args: argparse.Namespace) -> int:
    if args.ffn_hidden_size:
        return int(args.ffn_hidden_size)
    return int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size


def _linears(args: argparse.Namespace, width: int, ways: int) -> RankPart:
    """Return two linear layers with `width` in between, sharded `ways` times."""
    rows = (2 if args.swiglu or args.quick_geglu else 1) * width
    bias = not args.disable_bias_linear
    sharded = rows * args.hidden_size + args.hidden_size * width + (rows if bias else 0)
    return RankPart(sharded // ways, args.hidden_size if bias else 0, 0, 4 if bias else 2)


def _experts(args: argparse.Namespace) -> RankPart:
    """Return a layer's router and shared expert, and a rank's routed experts."""
    ways = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    expert = _linears(args, args.moe_ffn_hidden_size or _ffn(args), ways)
    local = args.num_experts // args.expert_model_parallel_size
    parts = [
        RankPart(0, args.num_experts * args.hidden_size, 0, 1),
        RankPart(0, 0, local * expert.numel, local * expert.tensors),
    ]
    if args.moe_shared_expert_intermediate_size:
        shared = args.moe_shared_expert_intermediate_size
        parts.append(_linears(args, shared, args.tensor_model_parallel_size))
    return _add(parts)


_WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def parameter_nbytes(args: argparse.Namespace) -> int:
    """Return the stored bytes per parameter: weight, fp32 master and optimizer state."""
    low = args.bf16 or args.fp16
    weight = 2 if low else 4
    if args.no_save_optim:
        return weight
    aware = args.use_precision_aware_optimizer
    master = 0
    if low:
        master = 2 if keeps_low_halves(args) else _WIDTH[args.main_params_dtype] if aware else 4
    if args.optimizer == "sgd":
        return weight + master + (4 if args.sgd_momentum else 0)
    if args.optimizer == "lion":
        return weight + master + 4
    moments = (args.exp_avg_dtype, args.exp_avg_sq_dtype) if aware else ("fp32", "fp32")
    return weight + master + sum(_WIDTH[moment] for moment in moments)


def keeps_low_halves(args: argparse.Namespace) -> bool:
    """Return whether the optimizer keeps, of fp32 masters, only the bits that bf16 weights lack.

    Megatron asks this of TransformerEngine's optimizer since TransformerEngine 2.1.
    """
    return bool(
        args.use_precision_aware_optimizer
        and args.bf16
        and args.main_params_dtype == "fp32"
        and args.fp8_recipe == "delayed"
        and not args.optimizer_cpu_offload
    )


def derived_nbytes(args: argparse.Namespace) -> int:
    """Return the bytes per parameter that `weights: derive` does not store.

    Raises:
        ConfigError: the job keeps no full fp32 masters, so `weights: derive` is refused.
    """
    if not (args.bf16 or args.fp16) or args.no_save_optim:
        return 0
    if not args.use_distributed_optimizer:
        raise ConfigError("--weights derive needs --use-distributed-optimizer after '--'")
    if args.use_precision_aware_optimizer and args.main_params_dtype != "fp32":
        raise ConfigError("--weights derive needs fp32 masters (--main-params-dtype fp32)")
    if keeps_low_halves(args):
        raise ConfigError(
            "--weights derive needs fp32 masters, of which --use-precision-aware-optimizer keeps "
            "only the low halves"
        )
    return 2
