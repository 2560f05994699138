"""Run an unedited training script with the shims in place.

torchrun ... -m megatron_flashckpt.launch pretrain_gpt.py ARGS
python -m megatron_flashckpt.launch pretrain_gpt.py ARGS
flashckpt-launch pretrain_gpt.py ARGS
"""

from __future__ import annotations

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
    """Run `argv[0]` (a script) with the remaining arguments, as `python SCRIPT ARGS` would."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        raise SystemExit(0 if argv else 2)
    script = argv[0]
    if not os.path.isfile(script):
        raise SystemExit(f"flashckpt-launch: {script}: no such script; give the path of a .py file")
    # As `python SCRIPT` does: the script's directory is on the path, and argv starts with the
    # script. Megatron-LM checkouts need that, because their `megatron` package lies there.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.argv = argv
    try:
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
    _run(script)


def _run(script: str) -> None:
    """Run the script; change its exit status 0 to 1 if its last save is not durable."""
    from megatron_flashckpt import exit_status
    from megatron_flashckpt.save.session import session

    try:
        runpy.run_path(script, run_name="__main__")
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
