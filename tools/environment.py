"""Creates `.venv` with all packages that the demo, the tests and the benchmarks need.

`scripts/install` runs this file with the Python version of the new `.venv`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

TORCH, TRITON, AZURITE = "2.13.0", "3.7.1", "3.35.0"
#: Releases of megatron-core: that of the demo and of all tests, and that on which the main job's
#: tests run again. Core 0.19 is first where its code runs as it is: it imports `typing.override`.
FIRST, SECOND = ("0.19.2", "0.17.1") if sys.version_info >= (3, 12) else ("0.17.1", "0.19.2")
REPO = Path(__file__).resolve().parents[1]
PYTHON = REPO / ".venv/bin/python"
#: Packages that Megatron imports. Core 0.19 imports triton, which only torch for CUDA brings.
OF_MEGATRON = (
    *("numpy", "packaging", "einops", "regex", "requests", "tqdm", "pyyaml"),
    f"triton=={TRITON}",
)

#: Megatron-Bridge, and the megatron-core that it needs. Its other packages take several GB.
BRIDGE = ("megatron-bridge==0.6.2", "megatron-core==0.19.2")


def pip_install(*arguments: str) -> bool:
    """Install into `.venv`; return True if that succeeded."""
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    return subprocess.run([*pip, *arguments], cwd=REPO, check=False).returncode == 0


def install_torch() -> bool:
    """Install an exact torch: a version range could select a build with gigabytes of CUDA."""
    if shutil.which("nvidia-smi"):
        return pip_install(f"torch=={TORCH}")
    # Prefer the CPU build from pip's configured index, else take PyTorch's own index.
    # The default index has the build for CUDA, which takes 5 GB and runs without a GPU, too.
    return (
        pip_install(f"torch=={TORCH}+cpu")
        or pip_install(f"torch=={TORCH}", "--index-url", "https://download.pytorch.org/whl/cpu")
        or pip_install(f"torch=={TORCH}")
    )


def install_first() -> bool:
    """Install FIRST into `.venv`: as it is, or on an older Python than its metadata requires."""
    if sys.version_info >= (3, 12):
        return pip_install(f"megatron-core=={FIRST}")
    return pip_install("--ignore-requires-python", "--no-deps", f"megatron-core=={FIRST}")


def install_second() -> bool:
    """Make `.venv/second`, whose Python has SECOND and otherwise the packages of `.venv`."""
    home = REPO / ".venv/second"
    subprocess.run([str(PYTHON), "-m", "venv", "--without-pip", str(home)], check=True)
    (packages,) = home.glob("lib/python3*/site-packages")
    lines = [str(REPO / ".venv" / packages.relative_to(home))]
    if sys.version_info < (3, 12):
        # Every process of this environment runs the line, and so can import core 0.19.
        lines.append("import typing; typing.override = lambda method: method")
    (packages / "first.pth").write_text("\n".join(lines) + "\n")
    options = ("--ignore-requires-python", "--no-deps", "--upgrade", "--target", str(packages))
    return pip_install(*options, f"megatron-core=={SECOND}")


def install_azurite() -> None:
    """Install Microsoft's emulator of Azure (190 MB), where there is npm.

    Its tests are skipped without it.
    """
    npm = shutil.which("npm")
    options = "--ignore-scripts --no-audit --no-fund --omit=dev --omit=optional --loglevel=error"
    command = [npm or "", "install", "--prefix", str(REPO / ".venv/azurite"), *options.split()]
    if npm is None or subprocess.run([*command, f"azurite@{AZURITE}"], check=False).returncode:
        print("scripts/install: without npm's package azurite, tests of Azure are skipped")


def install_bridge() -> None:
    """Install Megatron-Bridge into a directory of its own; its tests are skipped without it."""
    target = str(REPO / ".venv/bridge")
    if not pip_install("--ignore-requires-python", "--no-deps", "--target", target, *BRIDGE):
        print("scripts/install: without megatron-bridge, its tests are skipped")


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 (the Python of the machine)
        sys.exit(
            f"scripts/install: Python 3.10 or newer is needed, {sys.executable} is older; "
            "set PYTHON="
        )
    subprocess.run([sys.executable, "-m", "venv", str(REPO / ".venv")], check=True)
    # Install torch first, because the other packages accept any torch.
    succeeded = (
        install_torch()
        and pip_install(*OF_MEGATRON)
        and install_first()
        and install_second()
        # The package itself, and the tools of the tests.
        and pip_install("-e", ".[dev,redundancy]")
    )
    install_bridge()
    install_azurite()
    sys.exit(not succeeded)


if __name__ == "__main__":
    main()
