"""Limit of the storage bandwidth of real processes: `limited.c` wraps their file calls."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("limited.c")
#: Measured times may be this fraction of the time that the limit allows, because the page cache may
#: hold parts of files.
_TOLERANCE = 0.95


@dataclasses.dataclass(frozen=True)
class StorageLimit:
    """Bandwidth that all processes of a job share, for reads and writes together."""

    shared_object: Path
    mb_s: float

    @classmethod
    def made(cls, directory: Path, mb_s: float) -> StorageLimit:
        """Compile the shared object into `directory`.

        Raises:
            SystemExit: there is no C compiler.
        """
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("--storage-mb-s needs a C compiler: install gcc or clang")
        shared_object = directory / "limited.so"
        options = ["-shared", "-fPIC", "-O1", "-o", str(shared_object)]
        command = [compiler, *options, str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        return cls(shared_object, mb_s)

    def environment(self, root: Path) -> dict[str, str]:
        """Return environment variables that limit a process's reads and writes below `root`."""
        clock = root.with_suffix(".clock")
        if not clock.exists():
            # Never truncated: an agent of an earlier job may have it mapped, and would be killed.
            clock.write_bytes(bytes(8))
        return {
            "LD_PRELOAD": str(self.shared_object),
            "TRAIN_LIMIT_ROOT": str(root.resolve()),
            "TRAIN_LIMIT_BYTES_S": str(self.mb_s * 1e6),
            "TRAIN_LIMIT_CLOCK": str(clock),
            "FLASHCKPT_AGENT__ENVIRONMENT": "[LD_PRELOAD, TRAIN_LIMIT_*]",
        }

    def was_passed(self, nbytes: int, seconds: float) -> bool:
        """Return whether `nbytes` took less time than the limit allows."""
        return seconds < _TOLERANCE * nbytes / (self.mb_s * 1e6)
