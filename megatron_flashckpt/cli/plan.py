"""`flashckpt plan`: estimate sizes, times and memory of a job's checkpoints before it runs."""

from __future__ import annotations

import argparse
import json
import typing

import msgspec
from rich.console import Console

from megatron_flashckpt.catalog import history, listing
from megatron_flashckpt.catalog.measured_job import measured
from megatron_flashckpt.cli import plan_store
from megatron_flashckpt.cli.console import (
    complain,
    counted,
    human_size,
    human_time,
    json_help,
    print_facts,
    print_table,
    say,
)
from megatron_flashckpt.cli.plan_memory import print_host_memory
from megatron_flashckpt.config import Config, Redundancy, Weights
from megatron_flashckpt.errors import ConfigError, NotCommittedError
from megatron_flashckpt.megatron_lm import served
from megatron_flashckpt.megatron_lm.job_flags import changes_outside_steps
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
from megatron_flashckpt.sizing.store_requests import StoreUse

#: Rows of the host-memory table: numbers of GPUs relative to the job's.
_TIMES = (0.25, 0.5, 1, 2, 4)
#: Suffixes of a number of parameters.
_SUFFIXES = {"m": 1e6, "b": 1e9, "t": 1e12}
#: Checkpoints per day from which on a note says how much they are.
_MANY_PER_DAY = 100
_EPILOG = """\
example:
  flashckpt plan --gpus 1024 --iteration-s 12 --node-storage-gb-s 4 -- \\
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \\
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
    --position-embedding-type rope --disable-bias-linear --padded-vocab-size 128256 \\
    --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
"""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `plan --json`."""

    plan: Plan
    cluster: Cluster
    redundancy: Redundancy
    host_memory: list[HostMemory]
    """Host memory of several settings and numbers of GPUs."""
    assumed: list[str]
    """Sizes that the command line does not give."""
    notes: list[str]
    store: StoreUse | None
    """None unless the job's `--save` is the URL of an object store."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the argparse subparsers `subparsers`."""
    parser = subparsers.add_parser(
        "plan",
        help="estimate checkpoint size, save times, host memory and the best save interval",
        description="Estimate checkpoint size, save times, host memory and the best save interval\n"
        "of a job, from its Megatron arguments (after '--') and the figures of a cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=_count, required=True, metavar="N", help="ranks of the job")
    parser.add_argument(
        "--parameters",
        type=_parameters,
        metavar="N",
        help="parameters of the whole model, e.g. 70b; replaces the model's arguments after '--'",
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
    parser.add_argument(
        "--measured",
        metavar="DIR",
        help="save directory of this job or one like it: iteration time, blocked time, write speed "
        "and, after some interruptions, their distance come from its history",
    )
    parser.add_argument("--json", action="store_true", help=json_help(Figures))
    hints = typing.get_type_hints(Cluster, include_extras=True)
    for field in msgspec.structs.fields(Cluster):
        kind, meta = typing.get_args(hints[field.name])
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            metavar="N" if kind is int else "X",
            help=f"{meta.description} (default: {field.default:g})",
        )
    plan_store.add_arguments(parser)
    parser.add_argument(
        "megatron",
        metavar="-- MEGATRON ARGUMENTS",
        nargs="*",
        help="the job's command line: model, parallel sizes, precision; arguments that do not "
        "change sizes are ignored",
    )
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def _parameters(text: str) -> float:
    digits, factor = text, 1.0
    if text[-1:].lower() in _SUFFIXES:
        digits, factor = text[:-1], _SUFFIXES[text[-1].lower()]
    try:
        number = float(digits) * factor
    except ValueError:
        number = 0.0
    if not 1 <= number <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters")
    return number


def run(args: argparse.Namespace, out: Console) -> int:
    """Print the plan; return 1 if the job needs more host memory than a node has."""
    fields = [field.name for field in msgspec.structs.fields(Cluster)]
    given = {name: value for name in fields if (value := getattr(args, name)) is not None}
    found = {} if args.measured is None else _measured(args.measured, args.gpus_per_node)
    cluster = Cluster(**(found | given))
    size = sizes_of(args.megatron, args.gpus, args.parameters, args.weights)
    megatron = gpt_size.parse(args.megatron, model_known=True)
    notes = served.notes(megatron)
    if (flag := changes_outside_steps(megatron)) is not None:
        notes.append(f"{flag}: each save blocks training until everything is copied")
    if args.redundancy_group < 2:
        raise ConfigError(f"--redundancy-group {args.redundancy_group}: must be at least 2")
    result = plan(
        size,
        cluster,
        blocking=flag is not None,
        redundancy=args.redundancy,
        group=args.redundancy_group,
    )
    assumed = _assumptions(args, megatron)
    choices = _host_memory(args, cluster)
    store = plan_store.planned(args, megatron.save, result)
    if args.json:
        figures = Figures(
            plan=result,
            cluster=cluster,
            redundancy=args.redundancy,
            host_memory=choices,
            assumed=assumed,
            notes=notes,
            store=store,
        )
        say(out, json.dumps(msgspec.to_builtins(figures), indent=2))
    else:
        _print(result, cluster, args.redundancy, assumed, out)
        plan_store.print_use(store, out)
        out.print()
        print_host_memory(choices, cluster, out)
        for note in notes:
            complain(f"note: {note}", 0)
    if not result.fits:
        return complain(
            f"{counted(cluster.slots, 'slot')} of a node's ranks{_redundant(args.redundancy)} need "
            f"{human_size(int(result.host_memory_nbytes))} of host memory, more than "
            f"--host-memory-gb {cluster.host_memory_gb:g}: the job would stop before its first "
            f"step; use more nodes{_less_memory(args, cluster)}",
            1,
        )
    return 0


def _measured(directory: str, gpus_per_node: int | None) -> dict[str, float]:
    """Return the figures of a cluster that the history in a save directory tells.

    Raises:
        NotCommittedError: it tells none.
    """
    job = measured(history.events(listing.save_directory(directory)))
    if job is None:
        raise NotCommittedError(
            f"{directory}: no run has two committed saves in its history; let the job save twice, "
            "or give the figures by hand"
        )
    nodes = -(-job.world_size // (gpus_per_node or Cluster().gpus_per_node))
    # Nodes or storage may have been the limit. Both count, so a larger job is not promised more.
    found = {
        "iteration_s": job.iteration_s,
        "blocked_s": job.blocked_s,
        "storage_gb_s": job.nbytes_per_s / GB,
        "node_storage_gb_s": job.nbytes_per_s / GB / nodes,
    }
    if job.mtbf_s is not None:
        found["gpu_mtbf_h"] = job.mtbf_s * job.world_size / 3600
    return found


def _assumptions(args: argparse.Namespace, megatron: argparse.Namespace) -> list[str]:
    """Return the sizes that the figures assume, because the command line does not give them."""
    assumed = []
    if not (megatron.bf16 or megatron.fp16):
        assumed.append("weights in fp32, because '--' is followed by neither --bf16 nor --fp16")
    if args.parameters is not None:
        nbytes = gpt_size.parameter_nbytes(megatron)
        assumed.append(f"{nbytes} bytes per parameter, divided equally over the ranks")
    return assumed


def _advice(result: Plan) -> str:
    """Return advice on a day's checkpoints, which are all kept by default."""
    per_day = result.ours.nbytes_per_day / result.sizes.total_nbytes
    if per_day < _MANY_PER_DAY:
        return ""
    return (
        f". Keep a few of these {per_day:.0f} checkpoints a day: 'retention: {{latest: 3}}' takes "
        f"{human_size(3 * result.sizes.total_nbytes)} of storage. Or save less often, and lose "
        "more with each interruption"
    )


def _redundant(redundancy: Redundancy) -> str:
    return "" if redundancy == "none" else f", with 'redundancy: {redundancy}',"


def _less_memory(args: argparse.Namespace, cluster: Cluster) -> str:
    """Return advice on the settings that reduce host memory; empty if none would."""
    remedies = [
        ("--slots 1", cluster.slots > 1),
        ("--redundancy xor", args.redundancy == "copy"),
        ("--redundancy none", args.redundancy == "xor"),
        ("--weights derive", args.weights == "store"),
    ]
    named = [remedy for remedy, helps in remedies if helps]
    return f", or save less per rank ({', '.join(named)})" if named else ""


def _host_memory(args: argparse.Namespace, cluster: Cluster) -> list[HostMemory]:
    """Return the host memory of each choice of slots and redundancy, for several job sizes."""
    results: list[HostMemory] = []
    for gpus in (times * args.gpus for times in _TIMES):
        if gpus % 1:  # a quarter of one GPU
            continue
        try:
            size = sizes_of(args.megatron, int(gpus), args.parameters, args.weights)
        except ConfigError:  # the model cannot be sharded over this number of GPUs
            continue
        results += [
            host_memory(size, cluster, slots, redundancy, args.redundancy_group)
            for slots in (1, 2)
            for redundancy in typing.get_args(Redundancy)
            if redundancy == "none" or gpus > cluster.gpus_per_node
        ]
    return results


def sizes_of(
    words: list[str], gpus: int, parameters: float | None, weights: Weights = "store"
) -> Sizes:
    """Return the sizes of a job with Megatron's arguments `words` and the setting `weights`.

    Raises:
        ConfigError: `words` are incomplete, or the ranks cannot be divided by the parallel sizes.
        UnsupportedError: this package does not save such a job.
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


def _print(
    result: Plan, cluster: Cluster, redundancy: Redundancy, assumed: list[str], out: Console
) -> None:
    size, ours, gather = result.sizes, result.ours, result.gather
    memory = f"{human_size(int(result.host_memory_nbytes))} per node"
    if not result.fits:
        memory += f": MORE than the node's {cluster.host_memory_gb:g} GB"
    speed = size.total_nbytes / GB / result.persist_s
    facts = {
        **({"assumed": "; ".join(assumed)} if assumed else {}),
        "parameters": f"{size.parameters / 1e9:.3f} billion",
        "checkpoint": human_size(size.total_nbytes),
        "per rank": f"{human_size(int(size.rank_nbytes))} (at most "
        f"{human_size(size.largest_nbytes)})",
        "per node": f"{human_size(int(result.node_nbytes))}, {counted(result.nodes, 'node')}",
        "host memory": f"{memory} ({counted(cluster.slots, 'slot')}, redundancy: {redundancy})",
        "stage": f"{human_time(result.stage_s)} at {cluster.pcie_gb_s:g} GB/s per GPU",
        "persist": f"{human_time(result.persist_s)}, {speed:.1f} GB/s",
        "interruption": f"every {human_time(result.mtbf_s)}",
    }
    print_facts(out, facts)
    titles = ("save", "blocks", "durable after", "Young", "Daly", "interval", "lost per day")
    rows = [
        ("flashckpt", *_cells(ours)),
        ("stock async", *_cells(result.torch_dist_async)),
        ("gather", *_cells(gather)),
    ]
    cells = [list(column) for column in zip(*rows, strict=True)]
    print_table(out, [dict(zip(titles, cells, strict=True))])
    out.print()
    every = result.memory_interval_iterations
    per_day = ours.nbytes_per_day
    say(
        out,
        f"--save-interval {ours.interval_iterations}: every {human_time(ours.interval_s)}; writes "
        f"{human_size(int(per_day / 24))} per hour, {human_size(int(per_day))} per day, in "
        f"{result.persist_s / ours.interval_s:.0%} of the time; every checkpoint is kept unless "
        f"the setting 'retention' removes it{_advice(result)}",
    )
    if every < ours.interval_iterations:
        say(
            out,
            f"memory_interval: {every} (every {human_time(every * cluster.iteration_s)}); reduces "
            f"the lost time to {human_time(result.lost_s_per_day_with_memory)} per day",
        )
    else:
        say(out, "memory_interval: not needed; saves to storage can be as frequent as is useful")


def _cells(way: Strategy) -> list[str]:
    durable_s = way.durable_s or way.blocked_s
    times = (way.blocked_s, durable_s, way.young_s, way.daly_s, way.interval_s, way.lost_s_per_day)
    return [human_time(seconds) for seconds in times]
