"""Files beside the checkpoints, which need a save directory that is no object store."""

from __future__ import annotations

import os
from typing import Any

from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import ConfigError

#: Megatron's arguments that write files to `--save`, with the remedy.
_ARGUMENTS = {
    "log_progress": "leave out --log-progress",
    "enable_ft_package": "leave out --enable-ft-package",
    "save_wgrads_interval": "leave out --save-wgrads-interval",
    "save_dgrads_interval": "leave out --save-dgrads-interval",
}


def refuse_local_files(args: Any, config: Config) -> None:
    """Raise if anything would write files to `args.save`, which is a URL.

    As a path, a URL is a directory on a local disk of each node.

    Raises:
        ConfigError: names all of these settings, and how to do without them.
    """
    remedies = [remedy for name, remedy in _ARGUMENTS.items() if getattr(args, name, None)]
    if getattr(args, "wandb_project", None) and not getattr(args, "wandb_save_dir", None):
        remedies.append("give --wandb-save-dir")
    if config.agent.log_in_save_directory:
        remedies.append("set 'agent.log_in_save_directory: false'")
    if config.trace.directory and not os.path.isabs(config.trace.directory):
        remedies.append("give 'trace.directory' as an absolute path")
    if remedies:
        raise ConfigError(
            f"{args.save}: an object store takes no other files; {', '.join(remedies)}"
        )
