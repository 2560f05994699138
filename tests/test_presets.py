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
def test_a_preset_is_accepted_printed_listed_and_differs_from_the_defaults(
    preset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not main(["config", "check", str(preset)])
    settings = load_config(preset, {})
    assert msgspec.yaml.decode(capsys.readouterr().out, type=Config) == settings
    assert f"| `{preset.name}` |" in (CONFIGS / "README.md").read_text()
    assert (settings == Config()) == (preset.stem == "local")


def test_the_local_preset_has_all_fields() -> None:
    written = msgspec.yaml.decode((CONFIGS / "local.yaml").read_bytes())
    assert written == msgspec.json.decode(msgspec.json.encode(Config()))
