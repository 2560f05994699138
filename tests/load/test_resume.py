"""What a load does to the save directory after it has filled the model."""

from __future__ import annotations

from argparse import Namespace
from unittest import mock

import pytest

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.load import resume


@pytest.mark.parametrize(("flags", "opens"), [({}, True), ({"skip_train": True}, False)])
def test_a_job_that_only_evaluates_opens_no_run(
    flags: dict[str, bool], opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that trains there would be overtaken, and a read-only directory would be an error."""
    session = mock.Mock()
    monkeypatch.setattr(resume, "session", session)
    margs = Namespace(save="/save", finetune=False, **flags)
    resume._open_run(margs, Save(10, "000001-aaaa.00001.1"), (), None)
    assert session.checkpointer.return_value.runs.open.called is opens
