"""Settings: defaults, then a YAML file, then `FLASHCKPT_*` variables; unknown names are refused.

`load_config` is the only place that reads the environment. A nested field is named with a double
underscore: `FLASHCKPT_AGENT__GRACE_S=60` sets `agent.grace_s`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import inspect

from megatron_flashckpt import cpu_list
from megatron_flashckpt.agent_config import MOST, AgentConfig, Count, CountOrZero, Seconds
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.failpoints import VARIABLE as FAULT_VARIABLE
from megatron_flashckpt.waits import Wait

PREFIX = "FLASHCKPT_"
FILE_VARIABLE = "FLASHCKPT_CONFIG"

ShareOut = Literal["share", "first"] | Count
Weights = Literal["store", "derive"]
Redundancy = Literal["none", "copy", "xor"]


class Replicated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who writes state that several data-parallel replicas hold alike.

    `share`: every replica an equal byte share; `first`: the first replica all of it; a number N: N
    replicas, spread over the nodes, an equal byte share each.
    """

    weight: ShareOut = "share"
    """Model weights that no distributed optimizer shards."""

    optimizer: ShareOut = "share"
    """fp32 masters and moments of a plain (not distributed) optimizer."""


class Best(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints ranked by what `megatron_flashckpt.report_metric` was told of them."""

    metric: str
    """The name that it was reported by, e.g. `lm loss validation`."""

    keep: Count = 1
    """How many of the best."""

    mode: Literal["min", "max"] = "min"
    """Which is better: the lower value, or the higher one."""


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which committed checkpoints stay in storage: those that any of these rules keeps.

    Without a rule all stay (but for those that Megatron's `--save-retain-interval` lets go).
    """

    latest: Count | None = None
    """The newest so many."""

    every: Count | None = None
    """Those whose iteration is a multiple of this."""

    best: Best | None = None
    """The best by a metric."""

    max_age_hours: Annotated[float, msgspec.Meta(ge=0, le=MOST)] | None = None
    """Those that were committed within so many hours."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces of saves, phase by phase, in files that Perfetto (ui.perfetto.dev) opens."""

    directory: str | None = None
    """Where every node puts a file per save; a relative one lies in the save directory. `None`: no
    traces."""

    keep: Count = 20
    """Saves that every node keeps traces of: the newest."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. Every field has a default that is sound for a single node or a cluster."""

    runtime_dir: str | None = None
    """Where agents keep their sockets (mode 0700); `None`: below `XDG_RUNTIME_DIR` if that is a
    private directory, else `/tmp/flashckpt-<uid>`; another name if another user has taken that."""

    slots: Count = 2
    """Checkpoints that a rank keeps in host memory: the last one stays while the next is staged.
    With 1 the last one is in storage meanwhile: a save begins when the last one is committed or has
    failed (see `busy`), and a crash during its copies resumes from storage."""

    staging: Literal["deferred", "blocking"] = "deferred"
    """`deferred`: `save` returns while optimizer-owned state is still being copied, and the next
    optimizer step waits for it. `blocking`: `save` returns when all is copied."""

    pinned: bool = True
    """Page-lock the slots, so that a GPU copies into them at full speed while training continues.
    Page-locking takes 0.1 to 1 s per GiB, in the background. False: where it is so slow that
    training stalls meanwhile."""

    huge_pages: bool = True
    """Slots are made of huge pages of 2 MiB where the kernel can (Linux 6.1), whatever the system
    prefers for shared memory: allocated four times as fast, and read and written for less. False:
    as the system provides them, where memory is so fragmented that finding them takes long."""

    wait: Wait = "none"
    """What `save_checkpoint` waits for. `none`: returns as soon as training may continue. `staged`:
    when this rank's part is in host memory (implies `staging: blocking`). `durable`: when the
    checkpoint is committed, or has failed (see `on_failure`); at most `drain_timeout_s`. One call
    can ask for another wait: `with megatron_flashckpt.waiting("durable"):`."""

    busy: Literal["wait", "skip"] = "wait"
    """No free slot: `wait` for one, or `skip` this save on all ranks. `skip` costs one tiny
    all-reduce per save, the only collective of a save. With NCCL the training thread waits in it
    until the GPUs of all ranks have finished the work that was queued before. A job's last save is
    made up for when the job ends, if it was skipped."""

    on_failure: Literal["warn", "raise"] = "warn"
    """A save that failed in the background: log an error (on rank 0 and on the rank that failed),
    or stop training."""

    failures_in_a_row: CountOrZero | None = None
    """With `on_failure: warn`: stop training all the same when so many saves have failed one after
    the other; `None`: never."""

    stop_on_failed_first_save: bool = True
    """With `on_failure: warn`: stop training all the same if a save fails for a reason that only a
    person can end (no space, no quota, read-only, no permission, an operation that the file system
    does not support) and none of this start of the job was committed before."""

    exit_nonzero_unless_durable: bool = True
    """Exit with status 1 if the job's last save to storage is not durable when the job ends, as
    stock Megatron does when a save fails. Another status that the script exits with, and an
    exception, stay as they are. False: the exit status says nothing of saves."""

    probe_wait_s: Seconds | None = 60.0
    """Before the first step every node writes, renames and reads a small file in the save
    directory, and rank 0 waits so many seconds until it sees those of all nodes. None: no probe."""

    other_writer: Literal["refuse", "take_over"] = "refuse"
    """Another job that trains saves to this directory: `refuse` to start, or `take_over`: from then
    on the other job writes nothing there, and its saves fail. A job that has crashed is no obstacle
    (nor is this job's own former run)."""

    other_writer_wait_s: Seconds = 60.0
    """Longest wait of a start for such a job to end; and, after a crash, for an agent on a node
    that this run does not have to write what was staged."""

    drain_timeout_s: Seconds = 1800.0
    """Longest wait, at exit and with `wait: durable`, for a save to be committed."""

    memory_interval: Count | None = None
    """Iterations between saves to host memory only, between those to storage: sets Megatron's
    `--non-persistent-save-interval`. They cost no I/O and are restored from after a crash."""

    restore_from_memory: bool = True
    """Use the slots of a living agent when all ranks still have the newest checkpoint there."""

    damaged: Literal["fall_back", "stop"] = "fall_back"
    """The checkpoint to go on from is damaged: `fall_back` to the newest older one that is not (all
    ranks alike, iterations are lost, the log says so loudly), or `stop`. With `--ckpt-step` and
    with `--finetune` a load always stops: somebody wants that checkpoint and no other."""

    redundancy: Redundancy = "none"
    """What other nodes hold of this node's staged checkpoints, so that a lost node does not send
    the job back to storage. `copy`: the next node holds all of them, so slots take twice the
    memory. `xor`: the nodes of a group hold parity, which takes 1/(`redundancy_group` - 1) more."""

    redundancy_group: Annotated[int, msgspec.Meta(ge=2, le=MOST)] = 8
    """Nodes of a parity group, at least; one of them may be lost at a time."""

    read_threads: Count | None = None
    """Chunks (4 MiB each) read and verified at the same time by one rank. `None`: as many as
    the node has cores for each of its ranks, 1 to 4."""

    read_memory_mib: Annotated[int, msgspec.Meta(ge=64, le=MOST)] = 256
    """Host memory that a load may use on one rank beside what it fills, MiB."""

    share_reads: Literal["auto", "always", "never"] = "auto"
    """Chunks that several data-parallel replicas need: one of them reads each and sends it to the
    others (`always`), all read them (`never`), or whichever turns out to be faster (`auto`)."""

    weights: Weights = "store"
    """16-bit weights: `store` them, or `derive` them from their fp32 masters when they are loaded,
    which takes a seventh less memory and storage. `derive` needs optimizers that shard the state of
    every 16-bit parameter (`--use-distributed-optimizer`) and keep whole masters. FP8 and FP4
    weights are always derived."""

    replicated: Replicated = Replicated()
    retention: Retention = Retention()

    history: CountOrZero = 1000
    """Saves that `flashckpt-history.jsonl` in the save directory tells of, one line each, failed
    and removed ones included, for `flashckpt report`. 0: there is no such file."""

    trace: Trace = Trace()
    agent: AgentConfig = AgentConfig()

    @property
    def held_share(self) -> float:
        """Bytes that a node holds for other nodes per byte of its own slots."""
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
        path: YAML file; default: the file that `FLASHCKPT_CONFIG` names, if any.
        environ: the environment to read; default: this process's.

    Raises:
        ConfigError: naming every unknown key, every number out of its bounds, or the first value
            of a wrong type.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get(FILE_VARIABLE) or None
    settings = _read_file(Path(path)) if path else {}
    origin = f"{path}" if path else "the defaults"
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in (FILE_VARIABLE, FAULT_VARIABLE)
    }
    unknown = [key for key in _leaves(settings) if key not in _FIELDS]
    if unknown:
        raise ConfigError(_unknown_message(str(path), unknown))
    wanted = {name: name[len(PREFIX) :].lower().replace("__", ".") for name in variables}
    unknown = [name for name, key in wanted.items() if key not in _FIELDS]
    if unknown:
        raise ConfigError(_unknown_message("environment", unknown))
    for name, key in wanted.items():
        _assign(settings, key, _parse_scalar(variables[name]))
        origin = f"{origin} and {name}"
    if problems := _out_of_bounds(settings, inspect.type_info(Config)):
        raise ConfigError(f"{origin}: {'; '.join(problems)}; see configs/ for every field")
    try:
        return msgspec.convert(settings, Config)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{origin}: {error}; see configs/ for every field") from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        loaded = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); unset {FILE_VARIABLE} or correct the path"
        ) from error
    except Exception as error:  # 2020-99-99 is a ValueError of PyYAML's; other tags, other errors
        raise ConfigError(f"{path}: is not valid YAML ({error})") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must hold 'field: value' lines, holds {type(loaded).__name__}")
    return loaded


def _parse_scalar(text: str) -> Any:
    try:
        return msgspec.yaml.decode(text.encode())
    except Exception:  # as in a file; here it is just a string
        return text


def _assign(settings: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        settings = settings.setdefault(parent, {})
    settings[last] = value


def _leaves(settings: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and (key in _SECTIONS):
            keys += _leaves(value, key + ".")
        else:
            keys.append(key)
    return keys


def _out_of_bounds(value: Any, kind: inspect.Type, key: str = "") -> list[str]:
    """Return a sentence for each number in `value` beyond the `msgspec.Meta` bounds of its field.

    `msgspec.convert` refuses such a number too, but its message lacks the number.
    """
    match kind:
        case inspect.UnionType():
            return [line for member in kind.types for line in _out_of_bounds(value, member, key)]
        case inspect.StructType() if isinstance(value, dict):
            return [
                line
                for field in kind.fields
                if field.name in value
                for line in _out_of_bounds(value[field.name], field.type, f"{key}.{field.name}")
            ]
        case inspect.IntType() | inspect.FloatType() if type(value) in (int, float):
            name = key.removeprefix(".")
            if kind.ge is not None and value < kind.ge:
                return [f"{name} must be at least {kind.ge}, got {value}"]
            if kind.le is not None and not value <= kind.le:  # a NaN is not either
                return [f"{name} must be at most {kind.le}, got {value}"]
    return []


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


def _unknown_message(where: str, names: list[str]) -> str:
    return (
        f"{where}: unknown setting{'s' if len(names) > 1 else ''} {', '.join(sorted(names))}; "
        f"correct or remove {'them' if len(names) > 1 else 'it'}; known ones: {', '.join(_FIELDS)}"
    )
