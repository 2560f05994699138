"""Run an unedited training script, or a module, with Megatron's functions replaced by ours.

torchrun ... -m megatron_flashckpt.launch pretrain_gpt.py ARGS
python -m megatron_flashckpt.launch pretrain_gpt.py ARGS
flashckpt-launch pretrain_gpt.py ARGS

`-m MODULE` instead of the script runs a module, as `python -m MODULE` does.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

from megatron_flashckpt.errors import FlashCkptError

_REMEDIES = {
    "torch": "install megatron_flashckpt into the environment that trains, and start its Python",
    "megatron": "run the script of a Megatron-LM checkout, or put a checkout on PYTHONPATH",
}
"""Remedies by the package that is missing."""


def install() -> None:
    """Replace Megatron's functions by ours, in every module that has imported them."""
    from megatron_flashckpt import arguments, checkpointing
    from megatron_flashckpt.megatron_lm import announcements, compat, stock
    from megatron_flashckpt.save import entry_points

    stock.replace("checkpointing", "save_checkpoint", checkpointing.save_checkpoint)
    stock.replace("checkpointing", "load_checkpoint", checkpointing.load_checkpoint)
    stock.replace("checkpointing", "load_args_from_checkpoint", arguments.load_args_from_checkpoint)
    stock.replace("training", "evaluate", announcements.evaluate_and_report)
    entry_points.watch()
    if compat.has_async_utils():
        from megatron_flashckpt import async_utils

        stock.replace(
            "async_utils", "maybe_finalize_async_save", async_utils.maybe_finalize_async_save
        )


def main(argv: list[str] | None = None) -> None:
    """Run a script or a module with its arguments, as Python would.

    Args:
        argv: `SCRIPT ARGS` or `-m MODULE ARGS`; default: those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    is_module = argv[:1] == ["-m"]
    if is_module:
        argv = argv[1:]
    if argv[:1] in (["-h"], ["--help"]) and not is_module:
        print(__doc__)
        raise SystemExit(0)
    if not argv:
        print(__doc__, file=sys.stderr)
        raise SystemExit(2)
    target = argv[0]
    if not is_module and not os.path.isfile(target):
        raise SystemExit(
            f"flashckpt-launch: {target}: no such script; give the path of a .py file, or "
            "-m and the name of a module"
        )
    # As Python does: the first entry of the path is the script's directory, or with `-m` the
    # working directory. Megatron-LM checkouts need that, because their `megatron` package lies
    # there.
    script_directory = os.path.dirname(os.path.abspath(target))
    sys.path.insert(0, os.getcwd() if is_module else script_directory)
    sys.argv = argv
    try:
        if is_module:
            target = _main_module(target)
        install()
    except FlashCkptError as error:
        raise SystemExit(f"flashckpt-launch: {error}") from error
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _REMEDIES:
            raise
        raise SystemExit(
            f"flashckpt-launch: {package} is not installed for {sys.executable}; "
            f"{_REMEDIES[package]}"
        ) from error
    _run(target, is_module)


def _main_module(name: str) -> str:
    """Return the module that `python -m NAME` runs: for a package its `__main__`."""
    spec = None
    try:
        if name and not name.startswith("."):
            spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a parent package imports something that is missing
        spec = None
    if spec is None:
        raise SystemExit(
            f"flashckpt-launch: {name}: no such module for {sys.executable}; start in the "
            "directory that holds it, or put that directory on PYTHONPATH"
        )
    return name


def _run(target: str, is_module: bool = False) -> None:
    """Run the script or module; change its exit status 0 to 1 if its last save is not durable."""
    from megatron_flashckpt import exit_status
    from megatron_flashckpt.save.session import session

    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        exit_status.choose(end.code)
        if not exit_status.is_success():
            raise
    else:
        exit_status.choose(None)
    # Here rather than in the exit handler, which can set a status only by `os._exit`.
    if not session.end():
        raise SystemExit(exit_status.FAILED)


if __name__ == "__main__":
    main()
