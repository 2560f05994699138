"""The numbers of requests and their price; a server counts those of a real save elsewhere."""

from __future__ import annotations

import functools

import pytest

from megatron_flashckpt.sizing.cluster_model import Cluster, PerParameter, even_sizes, plan
from megatron_flashckpt.sizing.store_requests import Prices, Requests, of_a_save, store_use

counted = functools.partial(of_a_save, ranks=8, longest_pause_s=5.0)


def test_the_requests_of_a_save_grow_with_parts_nodes_and_time() -> None:
    first = counted(nodes=1, parts=3, waiting_s=0.0)
    assert first == Requests(8 * 5 + 1 + 12, 16 + 9 + 4)
    assert counted(nodes=1, parts=4, waiting_s=0.0).writes == first.writes + 8
    assert counted(nodes=2, parts=3, waiting_s=0.0) == Requests(first.writes + 1, first.reads + 9)
    assert counted(nodes=2, parts=3, waiting_s=50.0).reads == first.reads + 9 + 2 * 10


def test_the_price_of_a_day_is_that_of_its_saves_and_signs_of_life() -> None:
    result = plan(even_sizes(10**9, 64, 1, PerParameter(14, 14)), Cluster())
    per_save = Requests(1000.0, 100.0)
    prices = Prices(usd_per_1000_writes=1.0, usd_per_1000_reads=0.0)
    use = store_use(result, per_save, prices, looks_every_s=60.0)
    saves = 86400 / result.ours.interval_s
    assert use.per_day.writes == pytest.approx(1000 * saves + 43_200 + 8 * 1440)
    assert use.per_day.reads == pytest.approx(100 * saves + 86_400)
    assert use.usd_per_day == pytest.approx(saves + 43.2 + 8 * 1.44)
    assert use.per_save_and_node == Requests(1000 / 8, 100 / 8)
    assert use.nbytes_per_day == pytest.approx(saves * 14e9)
    assert use.usd_per_checkpoint_month == pytest.approx(14 * 0.023)
