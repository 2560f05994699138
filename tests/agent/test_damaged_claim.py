"""Saves of an agent while the file of the claim holds no valid claim."""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.file_format.file_names import CLAIM
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact
from tests.support.trainer import new_save_id


def test_an_unreadable_claim_fails_saves_but_ends_no_thread(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    trainer.claim()
    assert trainer.save(1).error is None
    claim = (root / CLAIM).read_bytes()
    (root / CLAIM).write_bytes(b"no claim")
    for iteration in (2, 3):
        trainer.stage(iteration, new_save_id())
        assert "is not a claim of a writer" in (trainer.outcome().error or "")
    (root / CLAIM).write_bytes(claim)
    assert trainer.save(4).error is None
    assert_intact(root, 4, [trainer])
