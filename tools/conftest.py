"""Settings for the programs that pytest runs: as in `tests/`, no settings come from outside."""

from tests.conftest import no_settings_from_outside

__all__ = ["no_settings_from_outside"]
