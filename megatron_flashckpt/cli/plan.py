"""`flashckpt plan`: what checkpoints of a job will take, before it runs."""

from __future__ import annotations

import argparse
import json
import typing

import msgspec
from rich.console import Console

from megatron_flashckpt.cli.console import add_row, complain, human_size, human_time, new_table, say
from megatron_flashckpt.config import Config, Redundancy, Weights
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.megatron_lm import served
from megatron_flashckpt.megatron_lm.job_flags import changes_beside_steps
from megatron_flashckpt.sizing import gpt_size
from megatron_flashckpt.sizing.cluster_model import (
    GB,
    Cluster,
    HostMemory,
    PerParameter,
    Plan,
    Sizes,
    Strategy,
    even_sizes,
    host_memory,
    plan,
    sizes,
)

#: Numbers of GPUs that the table of host memory has, relative to that of the job.
_TIMES = (0.25, 0.5, 1, 2, 4)
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
    parser.add_argument(
        "--redundancy",
        choices=typing.get_args(Redundancy),
        default="none",
        help="setting 'redundancy' (default: none)",
    )
    parser.add_argument(
        "--redundancy-group",
        type=int,
        default=Config().redundancy_group,
        metavar="N",
        help="setting 'redundancy_group' (default: %(default)s)",
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
    if args.redundancy_group < 2:
        raise ConfigError(f"--redundancy-group {args.redundancy_group}: must be at least 2")
    found = plan(
        size,
        cluster,
        blocking=flag is not None,
        redundancy=args.redundancy,
        group=args.redundancy_group,
    )
    choices = _host_memory(args, cluster)
    if args.json:
        figures = {
            "plan": found,
            "cluster": cluster,
            "redundancy": args.redundancy,
            "host_memory": choices,
            "notes": notes,
        }
        say(out, json.dumps(msgspec.to_builtins(figures), indent=2))
    else:
        _print(found, cluster, args.redundancy, out)
        out.print()
        _print_host_memory(choices, cluster, out)
        for note in notes:
            complain(f"note: {note}", 0)
    if not found.fits:
        return complain(
            f"{_slots(cluster.slots)} of a node's ranks{_redundant(args.redundancy)} take "
            f"{human_size(int(found.host_memory_nbytes))} of host memory, which is more than "
            f"--host-memory-gb {cluster.host_memory_gb:g}: the job would stop before its first "
            f"step; spread it over more nodes{_less_memory(args, cluster)}",
            1,
        )
    return 0


def _slots(number: int) -> str:
    return f"{number} slot{'s' if number > 1 else ''}"


def _redundant(redundancy: Redundancy) -> str:
    return "" if redundancy == "none" else f", with 'redundancy: {redundancy}',"


def _less_memory(args: argparse.Namespace, cluster: Cluster) -> str:
    """Return the settings that would take less host memory."""
    remedies = [
        ("--slots 1", cluster.slots > 1),
        ("--redundancy xor", args.redundancy == "copy"),
        ("--redundancy none", args.redundancy == "xor"),
        ("--weights derive", args.weights == "store"),
    ]
    named = [remedy for remedy, helps in remedies if helps]
    return f", or save less per rank ({', '.join(named)})" if named else ""


def _host_memory(args: argparse.Namespace, cluster: Cluster) -> list[HostMemory]:
    """Return what each choice of slots and redundancy takes, on fewer and on more GPUs, too."""
    found: list[HostMemory] = []
    for gpus in (times * args.gpus for times in _TIMES):
        try:
            size = sizes_of(args.megatron, int(gpus), args.parameters, args.weights)
        except ConfigError:  # they cannot be divided so
            continue
        if gpus < 1 or gpus % 1:
            continue
        found += [
            host_memory(size, cluster, slots, redundancy, args.redundancy_group)
            for slots in (1, 2)
            for redundancy in typing.get_args(Redundancy)
            if redundancy == "none" or gpus > cluster.gpus_per_node
        ]
    return found


def _print_host_memory(choices: list[HostMemory], cluster: Cluster, out: Console) -> None:
    """Print a row per number of GPUs, a column per choice of settings."""
    columns = [(slots, kind) for slots in (1, 2) for kind in typing.get_args(Redundancy)]
    cells = {(each.gpus, each.slots, each.redundancy): each for each in choices}
    say(
        out,
        "host memory per node, by slots and redundancy; !: more than its "
        f"{cluster.host_memory_gb:g} GB",
    )
    table = new_table("GPUs", *(f"{_slots(slots)}, {kind}" for slots, kind in columns))
    for gpus in sorted({each.gpus for each in choices}):
        add_row(table, out, f"{gpus:,}", *(_cell(cells.get((gpus, *at))) for at in columns))
    out.print(table)


def _cell(choice: HostMemory | None) -> str:
    if choice is None:  # there is no other node
        return "-"
    return human_size(int(choice.nbytes)) + ("" if choice.fits else " !")


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


def _print(found: Plan, cluster: Cluster, redundancy: Redundancy, out: Console) -> None:
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
        ("host memory", f"{memory} ({_slots(cluster.slots)}, redundancy: {redundancy})"),
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
