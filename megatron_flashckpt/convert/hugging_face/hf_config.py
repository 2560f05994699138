"""The `config.json` of a Hugging Face model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_flashckpt.errors import ConfigError, UnsupportedError

CONFIG = "config.json"
_MISSING = object()
#: Settings of Llama 3's frequencies for which Megatron has no arguments, with its values.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: The same of YaRN.
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """Settings of a model, with the place of their file for messages."""

    place: str
    settings: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting; `default` if it is missing or null."""
        value = self.settings.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a size.

        Raises:
            ConfigError: it is missing without a default, or is no positive integer.
        """
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise self._wrong(name, "a positive integer")
        return value

    def float(self, name: str, default: float | None = None) -> float:
        """Return a number.

        Raises:
            ConfigError: it is missing without a default, or is no number.
        """
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise self._wrong(name, "a number")
        return float(value)

    def require(self, **allowed: tuple[Any, ...]) -> None:
        """Raise UnsupportedError for a setting with another value; None means a missing one."""
        for name, values in allowed.items():
            if self.settings.get(name) not in values:
                listed = " or ".join(json.dumps(value) for value in values if value is not None)
                raise UnsupportedError(
                    f"{self.place}: {name} is {json.dumps(self.settings[name])}, and only {listed} "
                    "converts, because Megatron has no such model; give the template of a model "
                    "without it"
                )

    def with_defaults(self, **defaults: Any) -> HfConfig:
        """Return the config with values for settings that are missing."""
        return dataclasses.replace(self, settings={**defaults, **self.settings})

    def architecture(self, known: tuple[str, ...]) -> str:
        """Return the architecture.

        Raises:
            UnsupportedError: it is not one of `known`, or the weights are quantized.
        """
        named = self.get("architectures", [])
        if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
            raise UnsupportedError(
                f"{self.place}: architectures is {json.dumps(named)}, and these convert: "
                f"{', '.join(known)}; use --to safetensors for weights by Megatron's names"
            )
        if self.get("quantization_config"):
            raise UnsupportedError(
                f"{self.place}: has a quantization_config, and only weights that are not quantized "
                "convert; give a copy of the directory without this setting"
            )
        return str(named[0])

    @property
    def rope(self) -> dict[str, Any]:
        """Settings of rotary embeddings. transformers 5 has them together, transformers 4 apart."""
        merged: dict[str, Any] = {"rope_theta": self.get("rope_theta", 10000.0)}
        for name in ("rope_scaling", "rope_parameters"):
            value = self.get(name, {})
            if not isinstance(value, dict):
                raise self._wrong(name, "an object")
            merged |= value
        merged["rope_type"] = merged.get("rope_type", merged.get("type", "default"))
        return merged

    @property
    def rotary_base(self) -> int:
        """Base of rotary embeddings, which is an integer in Megatron.

        Raises:
            ConfigError: it is no integer.
        """
        theta = self.rope["rope_theta"]
        if type(theta) not in (int, float) or theta != int(theta):
            raise self._wrong("rope_theta", "a whole number")
        return int(theta)

    def _wrong(self, name: str, expected: str) -> ConfigError:
        value = self.settings.get(name, _MISSING)
        found = "is missing" if value is _MISSING else f"is {json.dumps(value)}"
        return ConfigError(
            f"{self.place}: {name} {found}, expected {expected}; give the config.json that belongs "
            "to the model"
        )


def read_config(directory: Path) -> HfConfig:
    """Return the settings in `directory`.

    Raises:
        ConfigError: there is no `config.json`, or it is no JSON object.
    """
    path = directory / CONFIG
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: does not exist; give a directory with the config.json and the tokenizer of a "
            "Hugging Face model"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); download it again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: is not a JSON object; give the config.json of a model")
    return HfConfig(str(path), settings)


def rotary(config: HfConfig) -> dict[str, Any]:
    """Return Megatron's arguments for rotary embeddings.

    Raises:
        UnsupportedError: Megatron does not have this kind of scaling.
    """
    rope = config.rope
    if rope["rope_type"] == "default":
        return {"rotary_base": config.rotary_base}
    _require_scaling(config, rope, "llama3", _LLAMA3)
    return {
        "rotary_base": config.rotary_base,
        "rope_scaling_factor": float(rope["factor"]),
        "use_rope_scaling": True,
    }


def latent_rotary(config: HfConfig) -> dict[str, Any]:
    """Return Megatron's arguments for rotary embeddings of latent attention.

    Raises:
        UnsupportedError: Megatron does not have this kind of scaling.
    """
    rope = config.rope
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": config.rotary_base}
    _require_scaling(config, rope, "yarn", _YARN)
    return {
        "mscale": float(rope.get("mscale", 1.0)),
        "mscale_all_dim": float(rope.get("mscale_all_dim", 0.0)),
        "rope_type": "yarn",
        "rotary_base": config.rotary_base,
        "rotary_scaling_factor": float(rope["factor"]),
    }


def _require_scaling(
    config: HfConfig, rope: dict[str, Any], kind: str, values: Mapping[str, float]
) -> None:
    """Raise UnsupportedError unless the scaling is of `kind` and has the `values`."""
    if rope["rope_type"] != kind:
        raise UnsupportedError(
            f"{config.place}: has rotary embeddings of type {json.dumps(rope['rope_type'])}, and "
            f"only default and {kind} convert; give the template of a model with one of them"
        )
    others = {name: rope.get(name) for name in values}
    if others != values or "factor" not in rope:
        raise UnsupportedError(
            f"{config.place}: rope_scaling has {json.dumps(others)}, and Megatron computes with "
            f"{json.dumps(values)} and a factor; give the template of a model with these values"
        )
