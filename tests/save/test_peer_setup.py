"""Setup of the copies on other nodes: a job's nodes, their addresses, and the requested saves."""

from __future__ import annotations

import socket

import pytest

from megatron_flashckpt.agent.protocol import PeerNode
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.load.offers import held_saves, missing_ranks, newest_saves
from megatron_flashckpt.save import peer_setup


def test_ranks_with_one_agent_form_a_node_and_nodes_follow_their_first_rank() -> None:
    """Two agents may be behind one address."""
    one, other, third = ("10.0.0.1", 7, "key1"), ("10.0.0.2", 7, "key2"), ("10.0.0.1", 8, "key3")
    assert peer_setup.nodes_of([other, other, one, None, one, third]) == (
        PeerNode("10.0.0.2", 7, "key2", (0, 1)),
        PeerNode("10.0.0.1", 7, "key1", (2, 4)),
        PeerNode("10.0.0.1", 8, "key3", (5,)),
    )


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1"])
def test_a_rendezvous_on_loopback_is_reached_by_loopback(
    monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    assert peer_setup.own_address() in ("127.0.0.1", "::1")


def test_a_name_that_resolves_to_loopback_only_here_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many distributions map the machine's own name to loopback in /etc/hosts."""
    called: list[str] = []

    def source(host: str) -> str:
        called.append(host)
        return "127.0.1.1" if host == "node7" else "10.1.2.3"

    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setattr(peer_setup, "_source_address", source)
    assert peer_setup.own_address() == "10.1.2.3"
    assert called == ["node7", "192.0.2.1"]


def test_a_rendezvous_without_an_address_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setenv("MASTER_ADDR", "no-such-host")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(AgentError, match=r"route to no-such-host .*set 'agent\.address'"):
        peer_setup.own_address()


def offers(*iterations: int) -> list[dict[str, object]]:
    return [{"iteration": number, "save_id": f"s{number}"} for number in iterations]


def test_ranks_without_any_of_the_newest_saves_request_them() -> None:
    """Rank 1 lacks the newest save, rank 2 is new, and rank 3 holds only an old save."""
    held = [offers(30, 20), offers(20, 10), offers(), offers(5)]
    newest = newest_saves(held, 2)
    assert newest == ("s30", "s20")
    assert missing_ranks(held, newest) == [2, 3]
    assert newest_saves([[], []], 2) == ()
    of_nodes = [((1, "s1"), (2, "a")), (), ((2, "a"), (3, "b"))]
    assert newest_saves([[], [], []], 2, of_nodes) == ("b", "a")
    assert newest_saves([offers(1), [], []], 2, of_nodes) == ("s1",), "those of ranks come first"


@pytest.mark.parametrize(("world_size", "missing"), [(2, (1,)), (6, (1, 2)), (None, (1, 2))])
def test_ranks_that_the_saving_job_did_not_have_are_not_missing(
    world_size: int | None, missing: tuple[int, ...]
) -> None:
    (save,) = held_saves([[{**offer, "world_size": world_size} for offer in offers(1)], [], []])
    assert save.missing == missing
