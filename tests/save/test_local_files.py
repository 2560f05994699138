"""A job that saves to an object store writes no other files there."""

from __future__ import annotations

import re
from argparse import Namespace

import pytest

from megatron_flashckpt.config import AgentConfig, Config, Trace
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.save.entry_points import refuse_local_files

URL = "s3://bucket/job"


@pytest.mark.parametrize(
    ("arguments", "config", "remedy"),
    [
        ({"log_progress": True}, Config(), "leave out --log-progress"),
        ({"wandb_project": "p", "wandb_save_dir": ""}, Config(), "give --wandb-save-dir"),
        ({}, Config(agent=AgentConfig(log_in_save_directory=True)), "set 'agent.log_in"),
        ({}, Config(trace=Trace(directory="traces")), "give 'trace.directory' as"),
    ],
)
def test_a_setting_that_writes_beside_the_checkpoints_is_refused(arguments, config, remedy):
    with pytest.raises(ConfigError, match=f"{URL}: .*{re.escape(remedy)}"):
        refuse_local_files(Namespace(save=URL, **arguments), config)


def test_files_elsewhere_are_allowed():
    args = Namespace(save=URL, log_progress=False, wandb_project="p", wandb_save_dir="/logs")
    refuse_local_files(args, Config(trace=Trace(directory="/logs/traces")))
