"""Every preset in `configs/` is accepted, explains each of its fields, and is listed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.config import Config, load_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
PRESETS = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_config_check_accepts_a_preset_and_prints_all_settings(
    preset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not main(["config", "check", str(preset)])
    assert msgspec.yaml.decode(capsys.readouterr().out, type=Config) == load_config(preset, {})


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_the_list_names_every_preset(preset: Path) -> None:
    assert f"| `{preset.name}` |" in (CONFIGS / "README.md").read_text()


def test_only_the_local_preset_has_the_defaults() -> None:
    assert [preset.stem for preset in PRESETS if load_config(preset, {}) == Config()] == ["local"]


def test_the_local_preset_has_all_fields() -> None:
    written = msgspec.yaml.decode((CONFIGS / "local.yaml").read_bytes())
    assert written == msgspec.json.decode(msgspec.json.encode(Config()))
