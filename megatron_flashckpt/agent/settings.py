"""Settings of an agent: set by the run that starts it, and changed by later runs."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_flashckpt.agent_config import CountOrZero, SentConfig
from megatron_flashckpt.config import Config, LocalTier, Trace


class AgentSettings(SentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of the configuration for the agent: sent on its command line and in `Configure`.

    Fields of the section `agent` are those of `SentConfig`.
    """

    history: CountOrZero = 0
    local_tier: LocalTier = LocalTier()
    trace: Trace = Trace()


def settings_of(config: Config) -> AgentSettings:
    """Return the agent's settings from `config`."""
    section = {name: getattr(config.agent, name) for name in SentConfig.__struct_fields__}
    return AgentSettings(
        **section, history=config.history, local_tier=config.local_tier, trace=config.trace
    )


def by_name(settings: AgentSettings) -> dict[str, Any]:
    """Return the value of each setting by its name in the configuration."""
    of_agent = {f"agent.{name}": getattr(settings, name) for name in SentConfig.__struct_fields__}
    sections = {
        f"{section}.{name}": value
        for section in ("local_tier", "trace")
        for name, value in msgspec.structs.asdict(getattr(settings, section)).items()
    }
    return {**of_agent, "history": settings.history, **sections}


def differences(former: AgentSettings, new: AgentSettings) -> tuple[str, ...]:
    """Return each setting that differs, named as in the configuration, with both values."""
    new_values = by_name(new)
    return tuple(
        f"{name} from {value!r} to {new_values[name]!r}"
        for name, value in by_name(former).items()
        if value != new_values[name]
    )
