"""`flashckpt plan`: what checkpoints of a job will take, before it runs."""

from __future__ import annotations

import argparse
import json
import typing

import msgspec
from rich.console import Console

from megatron_flashckpt.config import Weights
from megatron_flashckpt.console import (
    add_row,
    complain,
    human_size,
    human_time,
    new_table,
    say,
)
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.megatron_lm.job_flags import changes_beside_steps
from megatron_flashckpt.planning import gpt_size, served
from megatron_flashckpt.planning.cluster_model import (
    GB,
    Cluster,
    PerParameter,
    Plan,
    Sizes,
    Strategy,
    even_sizes,
    plan,
    sizes,
)

_EPILOG = """\
example:
  flashckpt plan --gpus 1024 --iteration-s 12 --node-storage-gb-s 4 -- \\
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \\
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
    --position-embedding-type rope --disable-bias-linear --padded-vocab-size 128256 \\
    --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the command line."""
    parser = commands.add_parser(
        "plan",
        help="estimate bytes, times and the best save interval of a job",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=_count, required=True, metavar="N", help="ranks of the job")
    parser.add_argument(
        "--parameters",
        type=float,
        metavar="N",
        help="of the whole model, e.g. 70e9, if Megatron's arguments do not tell",
    )
    parser.add_argument(
        "--weights",
        choices=typing.get_args(Weights),
        default="store",
        help="setting 'weights' (default: store)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    hints = typing.get_type_hints(Cluster, include_extras=True)
    for field in msgspec.structs.fields(Cluster):
        kind, said = typing.get_args(hints[field.name])
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            default=field.default,
            metavar="N" if kind is int else "X",
            help=f"{said.description} (default: {field.default:g})",
        )
    parser.add_argument(
        "megatron",
        metavar="-- MEGATRON ARGUMENTS",
        nargs="*",
        help="the job's own: model, parallel sizes, precision; what sizes do not follow from is "
        "passed over",
    )
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def run(args: argparse.Namespace, out: Console) -> int:
    """Print the plan."""
    fields = [field.name for field in msgspec.structs.fields(Cluster)]
    cluster = Cluster(**{name: getattr(args, name) for name in fields})
    size = sizes_of(args.megatron, args.gpus, args.parameters, args.weights)
    megatron = gpt_size.parse(args.megatron, model_known=True)
    notes = served.notes(megatron)
    if (flag := changes_beside_steps(megatron)) is not None:
        notes.append(f"{flag}: each save blocks training until everything is copied")
    found = plan(size, cluster, blocking=flag is not None)
    if args.json:
        figures = {"plan": msgspec.to_builtins(found), "cluster": msgspec.to_builtins(cluster)}
        say(out, json.dumps({**figures, "notes": notes}, indent=2))
    else:
        _print(found, cluster, out)
        for note in notes:
            complain(f"note: {note}", 0)
    if not found.fits:
        return complain(
            f"{cluster.slots} slots of a node's ranks take "
            f"{human_size(int(found.host_memory_nbytes))} of host memory, which is more than "
            f"--host-memory-gb {cluster.host_memory_gb:g}: the job would stop before its first "
            "step; spread it over more nodes, or save less per rank (--weights derive)",
            1,
        )
    return 0


def sizes_of(
    words: list[str], gpus: int, parameters: float | None, weights: Weights = "store"
) -> Sizes:
    """Return the sizes of a job with Megatron's arguments `words` and the setting `weights`.

    Raises:
        ConfigError: they do not say enough, or the ranks cannot be divided so.
        UnsupportedError: such a job is not served.
    """
    served.refuse_unserved(gpt_size.parse(words, model_known=True))
    megatron = gpt_size.parse(words, model_known=parameters is not None)
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    ep = megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    for ways in (tp * pp, etp * ep * pp):
        if ways < 1 or gpus % ways:
            raise ConfigError(
                f"--gpus {gpus} cannot be divided into model replicas of {ways} ranks"
            )
    nbytes = gpt_size.parameter_nbytes(megatron)
    derived = gpt_size.derived_nbytes(megatron) if weights == "derive" else 0
    stored = PerParameter(nbytes - derived, nbytes)
    if parameters is not None:
        return even_sizes(int(parameters), gpus, tp * pp, stored)
    stages = gpt_size.stages(megatron)
    return sizes(stages, world=gpus, tp=tp, ep=ep, etp=etp, stored=stored)


def _print(found: Plan, cluster: Cluster, out: Console) -> None:
    size, ours, gather = found.sizes, found.ours, found.gather
    table = new_table("", "")
    table.show_header = False
    memory = f"{human_size(int(found.host_memory_nbytes))} per node"
    if not found.fits:
        memory += f": MORE than its {cluster.host_memory_gb:g} GB"
    for name, value in (
        ("parameters", f"{size.parameters / 1e9:.3f} billion"),
        ("checkpoint", human_size(size.total_nbytes)),
        (
            "per rank",
            f"{human_size(int(size.rank_nbytes))} (at most {human_size(size.largest_nbytes)})",
        ),
        ("per node", f"{human_size(int(found.node_nbytes))}, {found.nodes} nodes"),
        ("host memory", f"{memory} ({cluster.slots} slots)"),
        ("stage", f"{human_time(found.stage_s)} at {cluster.pcie_gb_s:g} GB/s per GPU"),
        (
            "persist",
            f"{human_time(found.persist_s)}, {size.total_nbytes / GB / found.persist_s:.1f} GB/s",
        ),
        ("interruption", f"every {human_time(found.mtbf_s)}"),
    ):
        add_row(table, out, name, value)
    out.print(table)
    out.print()
    table = new_table(
        "save", "blocks", "durable after", "Young", "Daly", "interval", "lost per day"
    )
    for name, way in (("megatron_flashckpt", ours), ("gather, synchronous", gather)):
        add_row(table, out, name, *_cells(way))
    out.print(table)
    out.print()
    every = found.memory_interval_iterations
    per_day = ours.nbytes_per_day
    say(
        out,
        f"--save-interval {ours.interval_iterations}: every {human_time(ours.interval_s)}; writes "
        f"{human_size(int(per_day / 24))} per hour, {human_size(int(per_day))} per day, in "
        f"{found.persist_s / ours.interval_s:.0%} of the time; all of it stays unless the setting "
        "'retention' removes some",
    )
    if every < ours.interval_iterations:
        say(
            out,
            f"memory_interval: {every} (every {human_time(every * cluster.iteration_s)}; with it "
            f"{human_time(found.lost_s_per_day_with_memory)} are lost per day)",
        )
    else:
        say(out, "memory_interval: not needed, saves to storage are as frequent as pays")


def _cells(way: Strategy) -> list[str]:
    durable_s = way.durable_s or way.blocked_s
    times = (way.blocked_s, durable_s, way.young_s, way.daly_s, way.interval_s, way.lost_s_per_day)
    return [human_time(seconds) for seconds in times]
