"""Layers of every pipeline stage, computed from Megatron's own arguments.

The rules are those of `get_num_layers_to_build` and `get_transformer_layer_offset` of core 0.17. A
stage may have several chunks of layers; chunks are assigned to the stages in turn.
"""

from __future__ import annotations

import argparse
import re

from megatron_flashckpt.errors import ConfigError

#: Repetitions in --pipeline-model-parallel-layout, in the order in which Megatron expands them.
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
#: Longest expanded layout.
_MOST_CHARACTERS = 100_000


def layers_of_stages(args: argparse.Namespace) -> list[list[int]]:
    """Return the numbers of the layers of every pipeline stage.

    Raises:
        ConfigError: the layers cannot be divided over the stages.
    """
    chunks = _chunks_of_layout(args) if args.pipeline_model_parallel_layout else _even_chunks(args)
    layers: list[list[int]] = [[] for _ in range(args.pipeline_model_parallel_size)]
    start = 0
    for number, count in enumerate(chunks):
        layers[number % len(layers)] += range(start, start + count)
        start += count
    return layers


def _even_chunks(args: argparse.Namespace) -> list[int]:
    """Return the number of layers of every chunk, without an explicit layout."""
    stages = args.pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    embedding = args.account_for_embedding_in_pipeline_split
    loss = args.account_for_loss_in_pipeline_split
    ends = [count for count in (first, last) if count is not None]
    between = stages - len(ends)
    rest = args.num_layers + embedding + loss - sum(ends)
    if rest < 0 or between < 0 or (between and rest % between) or (not between and rest):
        raise _indivisible(args)
    of_stages = ([] if first is None else [first]) + [rest // between if between else 0] * between
    of_stages += [] if last is None else [last]
    times = _chunks_per_stage(args, of_stages[0])
    if any(count % times for count in of_stages):
        raise _indivisible(args)
    chunks = [count // times for _ in range(times) for count in of_stages]
    chunks[0] -= embedding
    chunks[-1] -= loss
    return chunks


def _chunks_per_stage(args: argparse.Namespace, layers: int) -> int:
    """Return the number of chunks of a stage with `layers` layers."""
    if args.pipeline_model_parallel_size == 1:
        return 1
    if args.num_virtual_stages_per_pipeline_rank:
        return int(args.num_virtual_stages_per_pipeline_rank)
    if args.num_layers_per_virtual_pipeline_stage:
        if layers % args.num_layers_per_virtual_pipeline_stage:
            raise _indivisible(args)
        return int(layers // args.num_layers_per_virtual_pipeline_stage)
    return 1


def _indivisible(args: argparse.Namespace) -> ConfigError:
    return ConfigError(
        f"--num-layers {args.num_layers} cannot be divided over "
        f"{args.pipeline_model_parallel_size} pipeline stages"
    )


def _chunks_of_layout(args: argparse.Namespace) -> list[int]:
    """Return the number of layers of every chunk in --pipeline-model-parallel-layout.

    `t` is a layer, `|` separates chunks, and `(t|)*3` or `t*3` repeats.
    """
    text = layout = str(args.pipeline_model_parallel_layout).replace(",", "")
    for pattern in _REPEATED:
        pieces = pattern.findall(layout)
        if (
            sum(len(piece) * min(int(times), _MOST_CHARACTERS) for piece, times in pieces)
            + len(layout)
            > _MOST_CHARACTERS
        ):
            raise ConfigError(f"--pipeline-model-parallel-layout {text}: has too many layers")
        layout = pattern.sub(lambda match: match[1] * int(match[2]), layout)
    chunks = [chunk.count("t") for chunk in layout.split("|")]
    if set(layout) - set("EtL|") or sum(chunks) != args.num_layers:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text}: is not a layout of {args.num_layers} layers "
            "(t), with E and L at the ends"
        )
    if len(chunks) % args.pipeline_model_parallel_size:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text}: has {len(chunks)} parts, which cannot be "
            f"divided over {args.pipeline_model_parallel_size} pipeline stages"
        )
    return chunks
