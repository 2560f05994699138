"""A model of checkpoints on a real cluster: bytes, times, how often to save, what failures cost.

It knows what a save of ours does (every rank copies its own part, every node writes what its ranks
have staged) and what a synchronous save that gathers does, and fills in the numbers of a cluster.
The formulas for the interval are those of

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
from megatron_flashckpt.sizing.gpt_size import Part

DAY_S = 86400.0
GB = 1e9
#: Part of an iteration in front of the optimizer's step, in which copies may be under way.
_BEFORE_STEP = 0.9
#: Elements to which Megatron's DDP aligns a parameter in its buffer, and a replica's part of it.
_ALIGN, _ALIGN_BUFFER = 64, 128


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds, over all ranks."""

    parameters: int
    ranks: int
    writers_of_a_gather: int
    """Ranks that write when each data parallel group gathers to its first rank."""
    rank_nbytes: float
    """Of the rank that holds most, on average over its data parallel group."""
    largest_nbytes: int
    """No rank writes more: Megatron divides padded buffers, not parameters."""
    total_nbytes: int
    gathered_nbytes: int
    """What a save that gathers stores: 16-bit weights too, under `weights: derive`."""
    group_nbytes: float
    """Of the data parallel group that holds most: what its first rank writes after a gather."""


class PerParameter(NamedTuple):
    """Bytes that are stored of each parameter."""

    ours: int
    gathered: int


def sizes(
    stages: Sequence[Part], *, world: int, tp: int, ep: int, etp: int, stored: PerParameter
) -> Sizes:
    """Return the sizes of a job's checkpoints.

    Args:
        stages: what a tensor rank holds on every pipeline stage.
        world: ranks in all.
    """
    replicas = world // (tp * len(stages))
    expert_replicas = world // (etp * ep * len(stages))
    heaviest = max(stages, key=lambda part: part.numel)
    dense = heaviest.cut + heaviest.alike
    rank = dense / replicas + heaviest.experts / expert_replicas
    # A bucket per data type and stage at least; with overlap, one per 40 million parameters.
    buckets = 1 + heaviest.numel // max(40_000_000, 1_000_000 * replicas)
    padding = _ALIGN * heaviest.tensors + buckets * math.lcm(_ALIGN_BUFFER, replicas)
    total = sum(tp * part.cut + part.alike + part.experts * (etp * ep) for part in stages)
    return Sizes(
        parameters=total,
        ranks=world,
        writers_of_a_gather=len(stages) * max(tp, etp * ep),
        rank_nbytes=rank * stored.ours,
        largest_nbytes=math.ceil((rank + padding / min(replicas, expert_replicas)) * stored.ours),
        total_nbytes=total * stored.ours,
        gathered_nbytes=total * stored.gathered,
        group_nbytes=(dense + heaviest.experts) * float(stored.gathered),
    )


def even_sizes(parameters: int, world: int, model_parts: int, stored: PerParameter) -> Sizes:
    """Return the sizes if all that is known is how many parameters there are."""
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


def _said(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What a model of a cluster is told. Speeds in GB/s (1e9 bytes).

    Interruptions: Llama 3 on 16,384 H100s had 419 in 54 days ("The Llama 3 Herd of Models", 2024,
    section 3.3.4), one per 50,000 GPU hours.
    """

    gpus_per_node: Annotated[int, _said("GPUs of a node")] = 8
    host_memory_gb: Annotated[float, _said("host memory of a node, GB")] = 1024.0
    pcie_gb_s: Annotated[
        float, _said("device to pinned host memory, per GPU (PCIe 4.0 x16 measures 20 to 25)")
    ] = 20.0
    node_storage_gb_s: Annotated[float, _said("writes of one node to storage")] = 2.0
    storage_gb_s: Annotated[float, _said("writes of all nodes together")] = 100.0
    network_gb_s: Annotated[float, _said("into one GPU from others (200 Gb/s: 25)")] = 25.0
    writer_gb_s: Annotated[float, _said("what one process writes with torch.save")] = 1.0
    gpu_mtbf_h: Annotated[
        float, _said("mean hours between interruptions of the job, per GPU, of all causes")
    ] = 50_000.0
    iteration_s: Annotated[float, _said("an iteration of training, seconds")] = 10.0
    restart_s: Annotated[
        float, _said("from an interruption to the next iteration, without the load, seconds")
    ] = 300.0
    memory_share: Annotated[
        float,
        _said(
            "part of the interruptions that no node is lost by, so that memory serves the restart; "
            "nearly 1 with 'redundancy'"
        ),
    ] = 0.2
    slots: Annotated[int, _said("setting 'slots'")] = 2
    blocked_s: Annotated[
        float,
        _said(
            "what a save blocks training for, beside copies that it must wait for, seconds; "
            "measured on CPU ranks"
        ),
    ] = 0.02
    commit_s_per_rank: Annotated[
        float, _said("merging a rank's commit record, seconds; measured by scripts/bench scale")
    ] = 0.0003

    def __post_init__(self) -> None:
        wrong = [
            name
            for name, value in msgspec.structs.asdict(self).items()
            if not (value >= 0 if name in _MAY_BE_0 else value > 0) or not math.isfinite(value)
        ]
        if wrong or self.memory_share > 1:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong or ["memory_share"])
            raise ConfigError(f"{named}: give a number that can be")


_MAY_BE_0 = ("restart_s", "memory_share", "commit_s_per_rank")


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """One way to save, at its best interval. Seconds."""

    blocked_s: float
    """Lost to training per save."""
    durable_s: float
    """From the call until the checkpoint can be loaded: what was trained meanwhile is at risk."""
    young_s: float
    daly_s: float
    interval_s: float
    """Daly's, but not more often than saves can be made durable; whole iterations."""
    interval_iterations: int
    lost_s_per_day: float
    """Blocked time, work done twice, and restarts."""
    nbytes_per_day: float
    """Written to storage."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What checkpoints of a job will take."""

    sizes: Sizes
    nodes: int
    node_nbytes: float
    host_memory_nbytes: float
    """Per node: all slots of its ranks, what it holds for other nodes (`redundancy`), and 64 MB per
    rank beside them."""
    fits: bool
    stage_s: float
    persist_s: float
    mtbf_s: float
    """Of the whole job."""
    ours: Strategy
    memory_interval_iterations: int
    """Between saves that stay in memory (`memory_interval`); as often as storage's: not needed."""
    lost_s_per_day_with_memory: float
    gather: Strategy
    """All optimizer state of a data parallel group gathered to its first rank, and written by it
    while training waits."""


def young(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval: sqrt(2 C M), good while C is much shorter than M."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, compute time between the end of a save and the next one's begin."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return young(cost_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice of settings takes on a node of a job with so many GPUs."""

    gpus: int
    slots: int
    redundancy: Redundancy
    nbytes: float
    fits: bool


def host_memory(
    sizes: Sizes, cluster: Cluster, slots: int, redundancy: Redundancy, group: int
) -> HostMemory:
    """Return what slots, and what other nodes' redundancy, take on each node.

    Args:
        group: nodes of a parity group, at least; the setting `redundancy_group`.
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
    """Return what the checkpoints of a job of these sizes will take on a cluster.

    Args:
        blocking: saves return when all is copied, as with the setting `staging: blocking`.
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
    ours = _strategy(blocked_s, durable_s, sizes.total_nbytes, mtbf_s, cluster)
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
        gather=_gather(sizes, cluster, mtbf_s),
    )


def _strategy(
    blocked_s: float, durable_s: float, nbytes: int, mtbf_s: float, cluster: Cluster
) -> Strategy:
    best = daly(blocked_s, mtbf_s)
    iterations = max(1, math.ceil(max(best, durable_s) / cluster.iteration_s))
    interval_s = iterations * cluster.iteration_s
    # A failure costs half an interval on average, and what was trained while the last save was on
    # its way to storage.
    per_failure = interval_s / 2 + durable_s + cluster.restart_s
    return Strategy(
        blocked_s=blocked_s,
        durable_s=durable_s,
        young_s=young(blocked_s, mtbf_s),
        daly_s=best,
        interval_s=interval_s,
        interval_iterations=iterations,
        lost_s_per_day=DAY_S * (blocked_s / interval_s + per_failure / mtbf_s),
        nbytes_per_day=DAY_S * nbytes / interval_s,
    )


def _memory_interval(
    blocked_s: float, stage_s: float, mtbf_s: float, ours: Strategy, cluster: Cluster
) -> int:
    """Return the iterations between saves to memory; they need no storage, only the copy."""
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
    # Training waits for all of it, so nothing that was trained meanwhile is at risk.
    blocked_s = gather_s + copy_s + write_s
    return _strategy(blocked_s, 0.0, sizes.gathered_nbytes, mtbf_s, cluster)
