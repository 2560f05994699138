"""What a load does to the save directory after it has filled the model."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.load import resume
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.megatron_lm.job_state import JobState


@pytest.mark.parametrize("trains", [True, False])
def test_a_job_that_only_evaluates_opens_no_run(trains: bool) -> None:
    """A job that trains there would be overtaken, and a read-only directory would be an error."""
    call, saves = mock.Mock(), mock.Mock()
    call.job, call.policy = JobState(chunks=[], trains=trains), LoadPolicy()
    resume._open_run(call, saves, Save(10, "000001-aaaa.00001.1"), (), None)
    assert saves.runs.open.called is trains
