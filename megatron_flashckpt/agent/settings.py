"""The settings of an agent: those that a run starts it with, or that a later run changes."""

from __future__ import annotations

import msgspec

from megatron_flashckpt.config import Config
from megatron_flashckpt.storage.direct_io import DirectMode


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What of the configuration the agent heeds. Each field is named as its command-line flag."""

    grace_s: float
    persist_threads: int
    write_threads: int
    write_mib_per_s: float | None
    writer_nice: int
    direct_io: DirectMode
    session_nice: int = 0
    cpus: str = "all"
    commit_timeout_s: float
    slow_save_s: float
    sigterm_timeout_s: float
    persist_on_leave: bool
    history: int = 0
    """Saves that the history in the save directory tells of."""
    trace_directory: str = ""
    """Empty: no traces."""
    trace_keep: int = 1


#: Where the configuration has the settings that do not belong to its section `agent`.
_ELSEWHERE = {
    "history": "history",
    "trace_directory": "trace.directory",
    "trace_keep": "trace.keep",
}


def settings_of(config: Config) -> AgentSettings:
    """Return what the agent needs to know of a configuration."""
    own = {name: getattr(config.agent, name) for name in _names() if name not in _ELSEWHERE}
    own["cpus"] = str(config.agent.cpus)
    return AgentSettings(
        **own,
        history=config.history,
        trace_directory=config.trace.directory or "",
        trace_keep=config.trace.keep,
    )


def flags(settings: AgentSettings) -> list[str]:
    """Return the settings as arguments of the agent's command line."""
    found = []
    for name in _names():
        value, flag = getattr(settings, name), name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [f"--{flag}", str(value)]
    return found


def differences(former: AgentSettings, new: AgentSettings) -> tuple[str, ...]:
    """Return each setting that differs, named as in the configuration, with both values."""
    return tuple(
        f"{_ELSEWHERE.get(name, f'agent.{name}')} from {getattr(former, name)!r} to "
        f"{getattr(new, name)!r}"
        for name in _names()
        if getattr(former, name) != getattr(new, name)
    )


def _names() -> list[str]:
    return [field.name for field in msgspec.structs.fields(AgentSettings)]
