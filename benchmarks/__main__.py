"""Benchmarks of saves, loads and their parts: `scripts/bench --help` lists them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.compare.driver import add_arguments, run
from benchmarks.studies.cluster_model import bench_model
from benchmarks.studies.exchange import bench_exchange
from benchmarks.studies.growth import bench_growth
from benchmarks.studies.idle_memory import bench_idle
from benchmarks.studies.persist import bench_persist
from benchmarks.studies.plan import bench_plan
from benchmarks.studies.replica_sharing import bench_share
from benchmarks.studies.resharding_load import bench_load
from benchmarks.studies.restart import bench_restart
from benchmarks.studies.scale import bench_scale
from benchmarks.studies.writers import bench_writers
from megatron_flashckpt.config import AgentConfig


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    save = commands.add_parser("save", help="saves and loads, beside other checkpoint systems")
    add_arguments(save)
    growth = commands.add_parser("growth", help="saves and loads of ours as state or ranks grow")
    growth.add_argument("--ranks", type=int, nargs="+", help="of 1, 2, 4, 8: only these jobs")
    growth.add_argument("--most-mib", type=int, default=1024, help="the largest state of a rank")
    growth.add_argument("--json", type=Path, help="where to write all figures")
    plan = commands.add_parser("plan", help="planning one rank's saves, and reads of 16,384 ranks'")
    plan.add_argument("--rounds", type=int, default=5)
    exchange = commands.add_parser(
        "exchange", help="a restart from memory on 16,384 ranks, planned"
    )
    exchange.add_argument("--rounds", type=int, default=3)
    load = commands.add_parser("load", help="a resharding load against raw reads of the same files")
    load.add_argument("--rounds", type=int, default=7)
    load.add_argument("--mib", type=int, default=2048, help="about the size of the checkpoint")
    load.add_argument("--threads", type=int, default=2)
    restart = commands.add_parser("restart", help="loads after a restart, against plain copies")
    restart.add_argument("--rounds", type=int, default=7)
    restart.add_argument("--ranks", type=int, default=2)
    restart.add_argument(
        "--mib", type=int, nargs="+", default=[256, 1024], help="state of one rank"
    )
    restart.add_argument(
        "--system", choices=("flashckpt", "flashckpt-small-pages"), default="flashckpt"
    )
    share = commands.add_parser("share", help="replicas that read once and send, or read it all")
    share.add_argument("--rounds", type=int, default=3)
    share.add_argument("--replicas", type=int, default=4)
    writers = commands.add_parser("writers", help="how many replicas should write, and where")
    writers.add_argument("--rounds", type=int, default=5)
    writers.add_argument("--mib", type=int, nargs="+", default=[8, 128], help="held alike")
    scale = commands.add_parser("scale", help="the commit, and a plan, for ever more ranks")
    scale.add_argument("--most", type=int, default=65_536, help="ranks")
    idle = commands.add_parser("idle", help="copies into memory that lay idle, as slots do")
    idle.add_argument("--seconds", type=float, default=80.0, help="how long it lies idle")
    idle.add_argument("--rounds", type=int, default=3)
    idle.add_argument("--mib", type=int, default=256)
    model = commands.add_parser("model", help="what flashckpt plan predicts, and what comes of it")
    model.add_argument("--rounds", type=int, default=5)
    model.add_argument("--mib", type=int, default=512, help="state of one rank")
    persist = commands.add_parser("persist", help="from call to commit, against raw writes")
    persist.add_argument("--rounds", type=int, default=7)
    persist.add_argument(
        "--mib", type=int, nargs="+", default=[253, 1024], help="about the size of a rank's state"
    )
    usual = AgentConfig()
    several = {"nargs": "+", "help": "settings to compare, all in turn"}
    persist.add_argument("--write-threads", type=int, default=[usual.write_threads], **several)
    persist.add_argument("--writer-nice", type=int, default=[usual.writer_nice], **several)
    ways = ("auto", "always", "never")
    persist.add_argument("--direct-io", choices=ways, default=[usual.direct_io], **several)
    persist.add_argument("--busy", action="store_true", help="while all cores compute")
    for command in (save, growth, load, restart, share, persist, scale, model):
        command.add_argument("--dir", type=Path, help="where to write (default: a temporary one)")
    args = parser.parse_args()
    width = None if sys.stdout.isatty() else 140
    out = Console(soft_wrap=True, highlight=False, width=width)
    if args.command == "plan":
        bench_plan(out, args.rounds)
        return
    if args.command == "exchange":
        bench_exchange(out, args.rounds)
        return
    if args.command == "idle":
        bench_idle(out, args.mib, args.seconds, args.rounds)
        return
    if args.command == "writers":
        bench_writers(out, args.mib, args.rounds)
        return
    if args.command == "save":
        run(out, args)
        return
    if args.command == "growth":
        bench_growth(out, args.dir, args.ranks, args.most_mib, args.json)
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        if args.command == "load":
            bench_load(out, Path(root), args.mib, args.threads, args.rounds)
        elif args.command == "restart":
            bench_restart(out, Path(root), args.mib, args.ranks, args.rounds, args.system)
        elif args.command == "model":
            bench_model(out, Path(root), args.mib, args.rounds)
        elif args.command == "scale":
            bench_scale(out, Path(root), args.most)
        elif args.command == "persist":
            settings = [
                AgentConfig(write_threads=threads, writer_nice=nice, direct_io=direct)
                for threads in args.write_threads
                for nice in args.writer_nice
                for direct in args.direct_io
            ]
            bench_persist(out, Path(root), args.mib, args.rounds, settings, busy=args.busy)
        else:
            bench_share(out, Path(root), args.replicas, args.rounds)


if __name__ == "__main__":
    main()
