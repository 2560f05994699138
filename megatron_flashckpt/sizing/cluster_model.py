"""Model of checkpoints on a cluster: sizes, times, save interval and the cost of failures.

The model compares three kinds of saves with the figures of a cluster. In ours every rank copies its
own part, and every node writes the parts of its ranks. Megatron's `torch_dist` with `--async-save`
does the same, but training waits for the whole copy. In the third each data parallel group gathers
its state to one rank, which writes it while training waits. Formulas of the interval:

- J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of
  the ACM 17(9), 1974: sqrt(2 C M);
- J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
  Generation Computer Systems 22(3), 2006, equation (37).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from megatron_flashckpt.config import Config, Redundancy
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.sizing.gpt_size import RankPart

DAY_S = 86400.0
GB = 1e9
#: Share of an iteration before the optimizer's step; copies overlap with it.
_BEFORE_STEP = 0.9
#: Elements to which Megatron's DDP aligns a parameter in its buffer, and a replica's share.
_ALIGN, _ALIGN_BUFFER = 64, 128


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a checkpoint and of its parts."""

    parameters: int
    ranks: int
    writers_of_a_gather: int
    """Ranks that write when each data parallel group gathers to its first rank."""
    rank_nbytes: float
    """Bytes of the rank that stores most, on average over its data parallel group."""
    largest_nbytes: int
    """Upper bound of a rank's bytes: Megatron divides padded buffers, not parameters."""
    total_nbytes: int
    """Bytes of a checkpoint, with the copies of all tensor ranks."""
    gathered_nbytes: int
    """Bytes of a save that gathers, which stores 16-bit weights also with `weights: derive`."""
    group_nbytes: float
    """Bytes that the first rank of the largest data parallel group writes after a gather."""


class PerParameter(NamedTuple):
    """Stored bytes per parameter."""

    ours: int
    gathered: int


def sizes(
    stages: Sequence[RankPart], *, world: int, tp: int, ep: int, etp: int, stored: PerParameter
) -> Sizes:
    """Return the sizes of a job's checkpoints.

    Args:
        stages: a tensor rank's part of the model, by pipeline stage.
        world: number of ranks.
    """
    replicas = world // (tp * len(stages))
    expert_replicas = world // (etp * ep * len(stages))

    def own_share(part: RankPart) -> float:
        # Experts have fewer replicas, so their stage may store most although it is not the largest.
        return (part.sharded + part.replicated) / replicas + part.experts / expert_replicas

    heaviest = max(stages, key=own_share)
    rank = own_share(heaviest)
    # At least one bucket per data type and stage; with overlap one per 40 million parameters.
    buckets = 1 + heaviest.numel // max(40_000_000, 1_000_000 * replicas)
    padding = _ALIGN * heaviest.tensors + buckets * math.lcm(_ALIGN_BUFFER, replicas)
    total = sum(tp * part.sharded + part.replicated + part.experts * (etp * ep) for part in stages)
    copies = sum((tp - 1) * part.replicated for part in stages)
    return Sizes(
        parameters=total,
        ranks=world,
        writers_of_a_gather=len(stages) * max(tp, etp * ep),
        rank_nbytes=rank * stored.ours,
        largest_nbytes=math.ceil((rank + padding / min(replicas, expert_replicas)) * stored.ours),
        total_nbytes=(total + copies) * stored.ours,
        gathered_nbytes=total * stored.gathered,
        group_nbytes=max(part.numel for part in stages) * float(stored.gathered),
    )


def even_sizes(parameters: int, world: int, model_parts: int, stored: PerParameter) -> Sizes:
    """Return the sizes of a model of which only the number of parameters is known."""
    total, gathered = parameters * stored.ours, parameters * stored.gathered
    return Sizes(
        parameters=parameters,
        ranks=world,
        writers_of_a_gather=model_parts,
        rank_nbytes=total / world,
        largest_nbytes=math.ceil(total / world),
        total_nbytes=total,
        gathered_nbytes=gathered,
        group_nbytes=gathered / model_parts,
    )


def _help(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a cluster and a job. Speeds are in GB/s (1e9 bytes per second).

    Interruptions: Llama 3 on 16,384 H100s had 419 in 54 days ("The Llama 3 Herd of Models", 2024,
    section 3.3.4), one per 50,000 GPU hours.
    """

    gpus_per_node: Annotated[int, _help("GPUs per node")] = 8
    host_memory_gb: Annotated[float, _help("host memory per node, GB")] = 1024.0
    pcie_gb_s: Annotated[
        float,
        _help(
            "copy speed from device to pinned host memory, GB/s per GPU (PCIe 4.0 x16: 20 to 25)"
        ),
    ] = 20.0
    node_storage_gb_s: Annotated[float, _help("write speed of one node to storage, GB/s")] = 2.0
    storage_gb_s: Annotated[float, _help("write speed of all nodes together, GB/s")] = 100.0
    network_gb_s: Annotated[
        float, _help("network speed into one GPU, GB/s (a link of 200 Gb/s: 25)")
    ] = 25.0
    writer_gb_s: Annotated[float, _help("write speed of one process with torch.save, GB/s")] = 1.0
    gpu_mtbf_h: Annotated[
        float, _help("mean GPU hours between interruptions of the job, of all causes")
    ] = 50_000.0
    iteration_s: Annotated[float, _help("duration of a training iteration, seconds")] = 10.0
    restart_s: Annotated[
        float, _help("time from an interruption to the next iteration, without the load, seconds")
    ] = 300.0
    memory_share: Annotated[
        float,
        _help(
            "share of interruptions after which the job resumes from memory, because no node was "
            "lost; nearly 1 with 'redundancy'"
        ),
    ] = 0.2
    slots: Annotated[int, _help("setting 'slots'")] = 2
    blocked_s: Annotated[
        float,
        _help(
            "time that a save blocks training, in addition to copies that training waits for, "
            "seconds; measured on CPU ranks"
        ),
    ] = 0.02
    async_blocked_s: Annotated[
        float,
        _help(
            "time that Megatron's torch_dist with --async-save blocks training, in addition to the "
            "copy, seconds; measured on CPU ranks"
        ),
    ] = 0.2
    commit_s_per_rank: Annotated[
        float,
        _help("time to merge a rank's commit record, seconds; measured by scripts/bench scale"),
    ] = 0.0003

    def __post_init__(self) -> None:
        wrong = [
            name
            for name, value in msgspec.structs.asdict(self).items()
            if not (_LEAST <= value <= _MOST or (value == 0 and name in _MAY_BE_0))
        ]
        if wrong or self.memory_share > 1:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong or ["memory_share"])
            raise ConfigError(f"{named}: out of range; give {_allowed_range(wrong)}")


#: Bounds of all figures. With these, no formula leaves the range of floating-point numbers.
_LEAST, _MOST = 1e-9, 1e12
_MAY_BE_0 = ("restart_s", "memory_share", "commit_s_per_rank")


def _allowed_range(wrong: list[str]) -> str:
    """Return the range of the fields `wrong`; of `memory_share` if none is listed."""
    if not wrong:
        return "a number from 0 to 1"
    zero = "0 or " if all(name in _MAY_BE_0 for name in wrong) else ""
    return f"{zero}a number from {_LEAST:g} to {_MOST:g}"


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a kind of save at its best interval, in seconds."""

    blocked_s: float
    """Training time lost per save."""
    durable_s: float
    """Time from the call until the checkpoint can be loaded; a failure in it loses that work."""
    young_s: float
    daly_s: float
    interval_s: float
    """Daly's interval, but at least `durable_s`; rounded up to whole iterations."""
    interval_iterations: int
    lost_s_per_day: float
    """Blocked time, repeated work and restarts."""
    nbytes_per_day: float
    """Bytes written to storage."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates for the checkpoints of a job."""

    sizes: Sizes
    nodes: int
    node_nbytes: float
    host_memory_nbytes: float
    """Host memory per node: all slots of its ranks, redundancy for other nodes, and 64 MB per rank
    in addition."""
    fits: bool
    stage_s: float
    persist_s: float
    mtbf_s: float
    """Mean time between interruptions of the whole job."""
    ours: Strategy
    memory_interval_iterations: int
    """Best setting `memory_interval`; not needed if it equals the interval of saves to storage."""
    lost_s_per_day_with_memory: float
    torch_dist_async: Strategy
    """Megatron's `torch_dist` with `--async-save` and `--ckpt-fully-parallel-save`."""
    gather: Strategy
    """All optimizer state of a data parallel group gathered to its first rank, and written by it
    while training waits."""


def young(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval: sqrt(2 C M), good while C is much shorter than M."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval: compute time from the end of a save to the start of the next."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return young(cost_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory per node for one choice of settings and number of GPUs."""

    gpus: int
    slots: int
    redundancy: Redundancy
    nbytes: float
    fits: bool


def host_memory(
    sizes: Sizes, cluster: Cluster, slots: int, redundancy: Redundancy, group: int
) -> HostMemory:
    """Return the host memory that a node needs for slots and for other nodes' redundancy.

    Args:
        group: least number of nodes in a parity group; the setting `redundancy_group`.
    """
    ranks = min(cluster.gpus_per_node, sizes.ranks)
    config = Config(redundancy=redundancy, redundancy_group=group)
    nbytes = slots * ranks * sizes.rank_nbytes * (1 + config.held_share) + 64e6 * ranks
    return HostMemory(
        gpus=sizes.ranks,
        slots=slots,
        redundancy=redundancy,
        nbytes=nbytes,
        fits=nbytes <= cluster.host_memory_gb * GB,
    )


def plan(
    sizes: Sizes,
    cluster: Cluster,
    *,
    blocking: bool = False,
    redundancy: Redundancy = "none",
    group: int = Config().redundancy_group,
) -> Plan:
    """Return the estimates for the checkpoints of a job on a cluster.

    Args:
        blocking: saves return when everything is copied, as with `staging: blocking`.
        redundancy: the setting of this name.
        group: the setting `redundancy_group`.
    """
    nodes = -(-sizes.ranks // cluster.gpus_per_node)
    node_nbytes = sizes.rank_nbytes * min(cluster.gpus_per_node, sizes.ranks)
    memory = host_memory(sizes, cluster, cluster.slots, redundancy, group)
    stage_s = sizes.largest_nbytes / (cluster.pcie_gb_s * GB)
    persist_s = max(
        node_nbytes / (cluster.node_storage_gb_s * GB),
        sizes.total_nbytes / (cluster.storage_gb_s * GB),
    )
    hidden_s = 0.0 if blocking else _BEFORE_STEP * cluster.iteration_s
    blocked_s = cluster.blocked_s + max(0.0, stage_s - hidden_s)
    commit_s = cluster.commit_s_per_rank * sizes.ranks
    mtbf_s = 3600 * cluster.gpu_mtbf_h / sizes.ranks
    durable_s = stage_s + persist_s + commit_s
    ours = strategy(blocked_s, durable_s, sizes.total_nbytes, mtbf_s, cluster)
    memory_iterations = _memory_interval(blocked_s, stage_s, mtbf_s, ours, cluster)
    return Plan(
        sizes=sizes,
        nodes=nodes,
        node_nbytes=node_nbytes,
        host_memory_nbytes=memory.nbytes,
        fits=memory.fits,
        stage_s=stage_s,
        persist_s=persist_s,
        mtbf_s=mtbf_s,
        ours=ours,
        memory_interval_iterations=memory_iterations,
        lost_s_per_day_with_memory=_lost_with_memory(
            memory_iterations * cluster.iteration_s, blocked_s, mtbf_s, ours, cluster
        ),
        torch_dist_async=strategy(
            cluster.async_blocked_s + stage_s,
            durable_s,
            sizes.gathered_nbytes,
            mtbf_s,
            cluster,
        ),
        gather=_gather(sizes, cluster, mtbf_s),
    )


def strategy(
    blocked_s: float, durable_s: float, nbytes: int, mtbf_s: float, cluster: Cluster
) -> Strategy:
    """Return the costs of saves at their best interval.

    Args:
        blocked_s, durable_s: see `Strategy`.
        nbytes: size of a checkpoint.
        mtbf_s: mean seconds between interruptions.
    """
    best = daly(blocked_s, mtbf_s)
    iterations = max(1, math.ceil(max(best, durable_s) / cluster.iteration_s))
    interval_s = iterations * cluster.iteration_s
    return Strategy(
        blocked_s=blocked_s,
        durable_s=durable_s,
        young_s=young(blocked_s, mtbf_s),
        daly_s=best,
        interval_s=interval_s,
        interval_iterations=iterations,
        lost_s_per_day=lost_s_per_day(interval_s, blocked_s, durable_s, mtbf_s, cluster.restart_s),
        nbytes_per_day=DAY_S * nbytes / interval_s,
    )


def lost_s_per_day(
    interval_s: float, blocked_s: float, durable_s: float, mtbf_s: float, restart_s: float
) -> float:
    """Return the seconds of training that saves and interruptions cost per day."""
    # On average a failure loses half an interval, and the training during the last save's writes.
    per_failure = interval_s / 2 + durable_s + restart_s
    return DAY_S * (blocked_s / interval_s + per_failure / mtbf_s)


def _memory_interval(
    blocked_s: float, stage_s: float, mtbf_s: float, ours: Strategy, cluster: Cluster
) -> int:
    """Return the iterations between saves to memory, which need the copy but no storage."""
    if not cluster.memory_share:
        return ours.interval_iterations
    best = daly(blocked_s, mtbf_s / cluster.memory_share)
    iterations = max(1, math.ceil(max(best, stage_s) / cluster.iteration_s))
    return min(iterations, ours.interval_iterations)


def _lost_with_memory(
    interval_s: float, blocked_s: float, mtbf_s: float, ours: Strategy, cluster: Cluster
) -> float:
    from_memory = interval_s / 2 + cluster.restart_s
    from_storage = ours.interval_s / 2 + ours.durable_s + cluster.restart_s
    share = cluster.memory_share
    per_failure = share * from_memory + (1 - share) * from_storage
    return DAY_S * (blocked_s / interval_s + per_failure / mtbf_s)


def _gather(sizes: Sizes, cluster: Cluster, mtbf_s: float) -> Strategy:
    replicas = sizes.ranks / sizes.writers_of_a_gather
    gather_s = sizes.group_nbytes * (1 - 1 / replicas) / (cluster.network_gb_s * GB)
    copy_s = sizes.group_nbytes / (cluster.pcie_gb_s * GB)
    # First ranks of data parallel groups are neighbours: they share few nodes.
    writing_nodes = -(-sizes.writers_of_a_gather // cluster.gpus_per_node)
    write_s = max(
        sizes.group_nbytes / (cluster.writer_gb_s * GB),
        sizes.gathered_nbytes / (writing_nodes * cluster.node_storage_gb_s * GB),
        sizes.gathered_nbytes / (cluster.storage_gb_s * GB),
    )
    # Training waits for the whole save, so a failure loses no training during it.
    blocked_s = gather_s + copy_s + write_s
    return strategy(blocked_s, 0.0, sizes.gathered_nbytes, mtbf_s, cluster)
