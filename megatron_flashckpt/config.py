"""Settings: defaults, then a YAML file, then `FLASHCKPT_*` variables; unknown names are refused.

Only `load_config` reads the environment. A double underscore in a variable's name separates a
section from its field: `FLASHCKPT_AGENT__GRACE_S=60` sets `agent.grace_s`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import inspect

from megatron_flashckpt import cpu_list
from megatron_flashckpt.agent_config import MOST, AgentConfig, Count, CountOrZero, Seconds
from megatron_flashckpt.config_values import repeated_names, suggestion, wrong_values
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.failpoints import VARIABLE as FAULT_VARIABLE
from megatron_flashckpt.waits import Wait

PREFIX = "FLASHCKPT_"
FILE_VARIABLE = "FLASHCKPT_CONFIG"

ShareOut = Literal["share", "first"] | Count
Weights = Literal["store", "derive"]
Redundancy = Literal["none", "copy", "xor"]


class Replicated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data-parallel replicas that write state of which each replica holds the same copy.

    `share`: every replica writes an equal share of the bytes. `first`: the first replica writes
    everything. A number N: N replicas, spread over the nodes, write an equal share each.
    """

    weight: ShareOut = "share"
    """Model weights that the distributed optimizer does not shard."""

    optimizer: ShareOut = "share"
    """fp32 masters and moments of a plain (not distributed) optimizer."""


class Best(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranking of checkpoints by a metric that `megatron_flashckpt.report_metric` reported."""

    metric: str
    """Name of the metric, as it was reported, e.g. `lm loss validation`."""

    keep: Count = 1
    """Number of best checkpoints to keep."""

    mode: Literal["min", "max"] = "min"
    """Better values: `min` for lower ones, `max` for higher ones."""


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for removing old checkpoints: a committed checkpoint is kept if any rule keeps it.

    Without a rule every checkpoint is kept, except those that Megatron's `--save-retain-interval`
    removes.
    """

    latest: Count | None = None
    """Keep this many of the newest checkpoints."""

    every: Count | None = None
    """Keep checkpoints whose iteration is a multiple of this number."""

    best: Best | None = None
    """Keep the best checkpoints by a metric. The variable sets the whole section: `{metric: lm loss
    validation, keep: 2}`."""

    max_age_hours: Annotated[float, msgspec.Meta(ge=0, le=MOST)] | None = None
    """Keep checkpoints since whose commit the job has trained for less than this many hours."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces of saves: timings of each phase, in files that Perfetto (ui.perfetto.dev) opens."""

    directory: str | None = None
    """Directory in which every node writes one trace file per save. A relative path lies in the
    save directory. `None`: no traces."""

    keep: Count = 20
    """Number of newest saves whose traces every node keeps."""


class LocalTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies of checkpoints on the nodes' own disks, which survive the agent and a reboot."""

    directory: Annotated[str, msgspec.Meta(pattern="^/")] | None = None
    """Absolute path of a directory that exists on a disk of each node. Every node writes its ranks'
    part of a checkpoint there before it goes to storage, also that of a checkpoint that is for
    memory only. A restarted job reads it where host memory is lost. An orderly end of the job
    deletes the copies. `None`: no copies."""

    keep: Annotated[int, msgspec.Meta(ge=2, le=MOST)] = 2
    """Checkpoints that stay on the disk of each node; one more while it is being written."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. Every default suits a single node and a cluster."""

    runtime_dir: str | None = None
    """Directory of the agents' logs (mode 0700). Ranks find only agents with the same setting.
    `None`: `/tmp/flashckpt-<uid>`."""

    slots: Count = 2
    """Checkpoints that a rank keeps in host memory. With 2 or more the last one stays in memory
    while the next one is staged. With 1 a save waits until the last one is committed or has failed
    (see `busy`), and a job that crashes while a save copies resumes from storage."""

    staging: Literal["deferred", "blocking"] = "deferred"
    """`deferred`: `save` returns while optimizer-owned state is still being copied, and the next
    optimizer step waits for the copies. `blocking`: `save` returns when everything is copied."""

    pinned: bool = True
    """Page-lock the slots, so that a GPU copies into them at full speed while training continues.
    Page-locking runs in the background, in short calls, and with pauses until the first save
    begins. Use `false` where page-locking is so slow that it stalls training."""

    huge_pages: bool = True
    """Allocate slots in huge pages of 2 MiB if the kernel supports that (Linux 6.1), whatever the
    system's setting for shared memory. Allocation is four times as fast; reads and writes need less
    CPU time. `false`: follow the system's setting; use it where memory is so fragmented that
    finding huge pages takes long."""

    wait: Wait = "none"
    """Event that `save_checkpoint` waits for. `none`: it returns as soon as training may continue.
    `staged`: when this rank's part is in host memory (implies `staging: blocking`). `durable`: when
    the save is committed or has failed (see `on_failure`), at most `drain_timeout_s`. One call can
    override the setting: `with megatron_flashckpt.waiting("durable"):`."""

    busy: Literal["wait", "skip"] = "wait"
    """Action if no slot is free: `wait` for one, or `skip` this save on all ranks. `skip` adds one
    small all-reduce per save, the only collective of a save. With NCCL the training thread waits in
    it until the GPUs of all ranks have finished their queued work. If a job's last save was
    skipped, it is made when the job ends."""

    on_failure: Literal["warn", "raise"] = "warn"
    """Action if a save fails in the background: `warn` logs an error (on rank 0 and on the rank
    that failed); `raise` stops training."""

    failures_in_a_row: Count | None = None
    """With `on_failure: warn`: stop training after this many consecutive failed saves. `None`:
    never stop."""

    stop_on_failed_first_save: bool = True
    """With `on_failure: warn`: stop training if a save fails, none was committed since the last
    start of the job, and only a person can remove the cause. Such causes are no space, no quota, a
    read-only file system, no permission, and an operation that the file system lacks."""

    exit_nonzero_unless_durable: bool = True
    """Exit with status 1 if the last save to storage is not durable when the job ends; stock
    Megatron does so if a save fails. A nonzero status or an exception of the script stays as it is.
    `false`: saves do not change the exit status."""

    probe_wait_s: Seconds | None = 60.0
    """Seconds that rank 0 waits for the storage probe. Before the first step every node tries the
    calls of a save on small files in the save directory. Rank 0 waits until it sees the files of
    all nodes. `None`: no probe. On a network file system a load waits at most as long for names
    that it knows to be missing, and then loads the newest checkpoint that it sees."""

    other_writer: Literal["refuse", "take_over"] = "refuse"
    """Action if another running job saves to this directory: `refuse` to start, or `take_over`,
    after which the saves of the other job fail, and nothing that it writes counts. A crashed job,
    and this job's former run, do not count."""

    other_writer_wait_s: Seconds = 60.0
    """Seconds that a start waits for another running job to end. After a crash also the seconds
    that it waits for the agent of a node outside this run to write staged checkpoints."""

    drain_timeout_s: Seconds = 1800.0
    """Seconds that a job waits for a save to be committed, at exit and with `wait: durable`."""

    memory_interval: Count | None = None
    """Iterations between saves that go to host memory only, in addition to those to storage. Sets
    Megatron's `--non-persistent-save-interval`. These saves need no storage I/O; a crashed job
    resumes from the newest one."""

    restore_from_memory: bool = True
    """Resume from the slots of a running agent if all ranks still have the newest checkpoint in
    memory. `false`: always resume from storage."""

    damaged: Literal["fall_back", "stop"] = "fall_back"
    """Action if the checkpoint to load is damaged: `fall_back` loads the newest older one that is
    intact, on all ranks, and logs the loss of iterations as an error; `stop` ends the job. With
    `--ckpt-step` or `--finetune` a load always stops, because the user named that checkpoint."""

    redundancy: Redundancy = "none"
    """Copies of staged checkpoints on other nodes, so that a job resumes from memory after it has
    lost a node. `copy`: the next node holds a full copy, so slots need twice the memory. `xor`: the
    nodes of a group hold parity, which needs 1/(`redundancy_group` - 1) more memory."""

    redundancy_group: Annotated[int, msgspec.Meta(ge=2, le=MOST)] = 8
    """Least number of nodes in a parity group. A group can lose one node at a time."""

    read_threads: Count | None = None
    """Chunks (4 MiB each) that one rank reads and verifies at the same time. `None`: the node's
    cores divided by its ranks, between 1 and 4, or 8 in a load from memory."""

    read_memory_mib: Annotated[int, msgspec.Meta(ge=64, le=MOST)] = 256
    """Host memory that a load may use per rank, in addition to the tensors that it fills, MiB."""

    share_reads: Literal["auto", "always", "never"] = "auto"
    """Reads of chunks that several data-parallel replicas need. `always`: one replica reads a chunk
    and sends it to the others. `never`: every replica reads it. `auto`: the faster of the two, as
    measured during the load."""

    weights: Weights = "store"
    """16-bit weights: `store` them, or `derive` them from their fp32 masters in a load, which needs
    a seventh less memory and storage. `derive` requires optimizers that shard the state of every
    trained 16-bit parameter (`--use-distributed-optimizer`) and keep full fp32 masters. Frozen
    weights are stored, and all layers under their keys. FP8 and FP4 weights are always derived."""

    replicated: Replicated = Replicated()
    retention: Retention = Retention()

    history: CountOrZero = 1000
    """Last saves, and last starts of the job, that stay in `flashckpt/history` in the save
    directory for `flashckpt report`, one small file each. A start of the job removes older ones.
    0: none is written."""

    local_tier: LocalTier = LocalTier()
    trace: Trace = Trace()
    agent: AgentConfig = AgentConfig()

    @property
    def held_share(self) -> float:
        """Bytes that a node holds for other nodes, per byte of its own slots."""
        if self.redundancy == "none":
            return 0.0
        return 1.0 if self.redundancy == "copy" else 1 / (self.redundancy_group - 1)

    def __post_init__(self) -> None:
        if self.agent.cpus not in ("all", "inherit"):
            try:
                cpu_list.parse(str(self.agent.cpus))
            except ValueError as error:
                raise ValueError(
                    f"agent.cpus: {error}; 'agent.cpus: all' and 'agent.cpus: inherit' work too"
                ) from error


def load_config(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Return the settings of this process.

    Args:
        path: YAML file; default: the file that `FLASHCKPT_CONFIG` names, if the variable is set.
        environ: environment variables; default: those of this process.

    Raises:
        ConfigError: the file cannot be read, or settings are wrong; the message lists every unknown
            name, or every wrong value with the allowed ones.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get(FILE_VARIABLE) or None
    settings = _read_file(Path(path)) if path else {}
    origin = f"{path}" if path else "the defaults"
    keys = _keys_of_variables(environ)
    leaves = _leaves(settings)
    if unknown := {key: key for key in leaves if key not in _FIELDS and key not in _SECTIONS}:
        raise ConfigError(_unknown_message(str(path), unknown, str))
    if not _SECTIONS.isdisjoint(leaves):  # a section whose value has no fields
        raise ConfigError(_wrong_message(str(path), settings))
    if unknown := {name: key for name, key in keys.items() if key not in _FIELDS}:
        raise ConfigError(_unknown_message("environment", unknown, _variable))
    for name, key in keys.items():
        _assign(settings, key, _parse_scalar(environ[name]))
        origin = f"{origin} and {name}"
    if message := _wrong_message(origin, settings):
        raise ConfigError(message)
    try:
        return msgspec.convert(settings, Config)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{origin}: {error}; see configs/ for every field") from error


class Origin(NamedTuple):
    """Place that a setting's value comes from."""

    source: Literal["default", "file", "variable"]
    place: str | None
    """Path of the file or name of the variable; None for a default."""


def origins(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, Origin]:
    """Return the origin of every setting; the arguments are those of `load_config`.

    A setting that a file or a variable sets to its default has that file or variable as its origin.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get(FILE_VARIABLE) or None
    result = dict.fromkeys(_FIELDS, Origin("default", None))
    for key in _leaves(_read_file(Path(path))) if path else ():
        result[key] = Origin("file", str(path))
    for name, key in _keys_of_variables(environ).items():
        result[key] = Origin("variable", name)
    return result


def _keys_of_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set something, with the dotted name of the setting of each."""
    return {
        name: name[len(PREFIX) :].lower().replace("__", ".")
        for name in environ
        if name.startswith(PREFIX) and name not in (FILE_VARIABLE, FAULT_VARIABLE)
    }


def _read_file(path: Path) -> dict[str, Any]:
    try:
        encoded = path.read_bytes()
        loaded = msgspec.yaml.decode(encoded)
        repeated = repeated_names(encoded)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); unset {FILE_VARIABLE} or correct the path"
        ) from error
    except Exception as error:  # PyYAML raises other classes, too: a ValueError for 2020-99-99
        raise ConfigError(f"{path}: is not valid YAML ({error})") from error
    if repeated:  # of two sections of one name, only the last would count
        raise ConfigError(f"{path}: holds {', '.join(repeated)} more than once; keep one of each")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must hold 'field: value' lines, holds {type(loaded).__name__}")
    return loaded


def _parse_scalar(text: str) -> Any:
    try:
        return msgspec.yaml.decode(text.encode())
    except Exception:  # text that is not valid YAML is a string
        return text


def _assign(settings: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        settings = settings.setdefault(parent, {})
    settings[last] = value


def _variable(key: str) -> str:
    """Return the environment variable of the setting `key`."""
    return PREFIX + key.upper().replace(".", "__")


def _leaves(settings: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and (key in _SECTIONS):
            keys += _leaves(value, key + ".")
        else:
            keys.append(key)
    return keys


def _field_names(struct: type[msgspec.Struct], prefix: str = "") -> list[str]:
    names = []
    for field in msgspec.structs.fields(struct):
        key = prefix + field.name
        if isinstance(field.default, msgspec.Struct):
            names += _field_names(type(field.default), key + ".")
        else:
            names.append(key)
    return names


_FIELDS = _field_names(Config)
_SECTIONS = {name.rsplit(".", 1)[0] for name in _FIELDS if "." in name}


def _wrong_message(origin: str, settings: dict[str, Any]) -> str | None:
    """Return the error for all wrong values in `settings`; None if there are none."""
    sentences = wrong_values(settings, inspect.type_info(Config), "")
    return f"{origin}: {'; '.join(sentences)}; see configs/ for every field" if sentences else None


def _unknown_message(place: str, names: Mapping[str, str], shown: Callable[[str], str]) -> str:
    """Return the error for unknown names, with a similar known name, or else all known ones.

    Args:
        names: the unknown names as the user wrote them, each with its dotted form.
        shown: returns a known setting's name as the user would write it.
    """
    suggestions = {name: suggestion(key, _FIELDS, shown) for name, key in sorted(names.items())}
    plural, them = ("s", "them") if len(names) > 1 else ("", "it")
    message = (
        f"{place}: unknown setting{plural} "
        f"{', '.join(name + similar for name, similar in suggestions.items())}; correct or "
        f"remove {them}"
    )
    if all(suggestions.values()):
        return message
    return f"{message}; known ones: {', '.join(map(shown, _FIELDS))}"
