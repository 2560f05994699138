"""The part of `flashckpt plan` about an object store, if Megatron's --save is a URL."""

from __future__ import annotations

import argparse
import math
import typing

import msgspec
from rich.console import Console

from megatron_flashckpt.cli.console import human_size, say
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.sizing.cluster_model import Plan
from megatron_flashckpt.sizing.store_requests import (
    Prices,
    Requests,
    StoreUse,
    of_a_save,
    store_use,
)
from megatron_flashckpt.storage.object_store import ObjectStore, part_nbytes
from megatron_flashckpt.storage.opening import is_url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each price."""
    hints = typing.get_type_hints(Prices, include_extras=True)
    for field in msgspec.structs.fields(Prices):
        _, meta = typing.get_args(hints[field.name])
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=float,
            metavar="X",
            default=field.default,
            help=f"{meta.description}, if --save is the URL of an object store (default: "
            "%(default)g, a list price of S3)",
        )


def planned(args: argparse.Namespace, save: str | None, plan: Plan) -> StoreUse | None:
    """Return the use of the object store `save`; None if `save` is no URL of one.

    Raises:
        ConfigError: a price is below 0, or no number.
    """
    given = {field.name: getattr(args, field.name) for field in msgspec.structs.fields(Prices)}
    for name, price in given.items():
        if not 0 <= price < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: {price:g} is not a price; give 0 or more")
    if save is None or not is_url(save):
        return None
    sizes, pace = plan.sizes, ObjectStore.pace
    nbytes = math.ceil(sizes.rank_nbytes)
    per_save = of_a_save(
        ranks=sizes.ranks,
        nodes=plan.nodes,
        parts=-(-nbytes // part_nbytes(nbytes)),
        waiting_s=plan.ours.durable_s,
        longest_pause_s=max(pace.longest_s, plan.nodes / pace.most_per_s),
    )
    return store_use(plan, per_save, Prices(**given), pace.idle_s(plan.nodes))


def print_use(use: StoreUse | None, out: Console) -> None:
    if use is None:
        return
    say(
        out,
        f"object store: at most {_shown(use.per_save)} per save, {_shown(use.per_save_and_node)} "
        f"per save and node, {_shown(use.per_day)} per day; requests cost ${use.usd_per_day:,.2f} "
        f"per day, {human_size(int(use.nbytes_per_day))} per day are sent, and one checkpoint "
        f"costs ${use.usd_per_checkpoint_month:,.2f} per month for which it is kept",
    )


def _shown(requests: Requests) -> str:
    return f"{requests.writes:,.0f} writes and {requests.reads:,.0f} reads"
