"""Tests of every feature with every release's own `pretrain_gpt.py`, on CPU ranks.

`scripts/compat` runs these tests: they need a clone of Megatron-LM and take an hour. A release's
tests run in order, because a later feature reads the checkpoints of earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from patches.patch import TAGS
from tools.compat.matrix import FEATURES, MATRIX, Trial


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    matrix = metafunc.config.stash.get(MATRIX, None)
    tags = list(TAGS) if matrix is None else matrix.tags
    metafunc.parametrize("release", tags, indirect=True, scope="module")
    metafunc.parametrize("feature", FEATURES)


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest) -> Iterator[Trial]:
    matrix = request.config.stash.get(MATRIX, None)
    if matrix is None:
        pytest.skip("trees of other releases: run MEGATRON_LM=/path/to/clone scripts/compat")
    with matrix.trial(request.param) as trial:
        yield trial


def test_a_feature_works_with_a_release(release: Trial, feature: str) -> None:
    release.check(feature)
