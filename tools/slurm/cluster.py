"""Real Slurm on this machine: a controller and two nodes, each in its own namespaces.

A node has its own network, host name, `/etc/hosts` and runtime directory of agents; the nodes share
the file system and the kernel's control groups. All daemons are children of the test and keep their
state in its directory, so the test removes all of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Proctrack = Literal["pgid", "cgroup"]

NODES = ("node1", "node2")
_CONTROLLER = "ctl"
_NETWORK = "10.231.17"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
#: Longest wait for an answer, far more than the daemons of an idle machine need.
PATIENCE_S = 60.0
_CONFIG = """\
ClusterName=flashckpt
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={directory}/munge.socket
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
GresTypes=gpu
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MinJobAge=600
NodeName=node[1-2] CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 \
RealMemory=8000 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return why Slurm cannot run here; None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: run scripts/test_slurm"
    if os.geteuid() != 0:
        return "nodes are network namespaces, which only root makes"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return f"this machine makes no namespaces: {made.stderr.strip()}" if made.returncode else None


def why_no_cgroups() -> str | None:
    """Return why `proctrack/cgroup` cannot run here; None if it can."""
    for mounted in (Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")):
        if mounted.is_dir() and (mounted / "cgroup.procs").exists():
            probe = mounted / f"flashckpt-{os.getpid()}"
            try:
                probe.mkdir()
            except OSError as error:
                return f"{mounted}: no control group can be made ({error.strerror})"
            probe.rmdir()
            return None
    return "no control groups are mounted below /sys/fs/cgroup"


class Cluster:
    def __init__(self, directory: Path, proctrack: Proctrack) -> None:
        self.directory = directory
        self.runtime_dir = directory / "run"
        self._proctrack = proctrack
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # Names are unique for each run of the suite and for each cluster of a run.
        self._prefix = f"flashckpt-{os.getpid()}-{proctrack}"

    def start(self) -> None:
        """Return when both nodes are idle."""
        for name in ("state", "run", *(f"spool-{node}" for node in NODES)):
            (self.directory / name).mkdir(parents=True)
        values = {"directory": self.directory, "controller": _CONTROLLER}
        config = _CONFIG.format(**values, proctrack=self._proctrack)
        (self.directory / "slurm.conf").write_text(config)
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=autodetect\nIgnoreSystemd=yes\n")
        for number in range(8):
            (self.directory / f"gpu{number}").touch()
        gpus = f"NodeName=node[1-2] Name=gpu File={self.directory}/gpu[0-7]\n"
        (self.directory / "gres.conf").write_text(gpus)
        addresses = {_CONTROLLER: 1, **{node: 11 + i for i, node in enumerate(NODES)}}
        hosts = [f"{_NETWORK}.{last} {name}" for name, last in addresses.items()]
        (self.directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        self._connect(addresses)
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        files = {"key-file": key, "socket": self.directory / "munge.socket"}
        files |= {name: self.directory / f"munge.{name}" for name in ("pid-file", "seed-file")}
        options = [f"--{name}={path}" for name, path in files.items()]
        # Forced, because all users can write to the parent of the test's directory.
        self._begin(
            "munged",
            ["munged", "--foreground", "--force", f"--log-file={self.directory}/munged", *options],
        )
        self._await("munge", (self.directory / "munge.socket").exists)
        conf = str(self.directory / "slurm.conf")
        self._begin(_CONTROLLER, self.inside(_CONTROLLER, "slurmctld", "-D", "-f", conf))
        for node in NODES:
            self.start_node(node)
        self._await("idle nodes", lambda: self.run("sinfo", "-h", "-o", "%T %D") == "idle 2")

    def start_node(self, node: str) -> None:
        """Start slurmd, also after `lose_node`."""
        conf = str(self.directory / "slurm.conf")
        self._begin(node, self.inside(node, "slurmd", "-D", "-f", conf, "-N", node))

    def lose_node(self, node: str) -> None:
        """Kill slurmd and all processes of a node at once."""
        self._kill(node)
        self._daemons.pop(node).wait()

    def inside(self, host: str, *command: str) -> list[str]:
        """Return the command line that runs `command` on a host."""
        # Not `ip netns exec`, which mounts a /sys without control groups.
        enter = (
            f"hostname {host} && mount --bind '{self.directory}/hosts' /etc/hosts && "
            f"mount -t tmpfs -o mode=700 none '{self.runtime_dir}' && exec \"$@\""
        )
        space = ["nsenter", f"--net=/run/netns/{self._prefix}-{host}"]
        space += ["unshare", "--uts", "--mount", "--propagation", "private"]
        return [*space, "bash", "-c", enter, "bash", *command]

    def run(self, *command: str, **variables: str) -> str:
        """Run a command of Slurm on the controller in this directory; return its output."""
        done = subprocess.run(
            self.inside(_CONTROLLER, *command),
            env={**self._environment(), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and command[0] != "sinfo":
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job` for a job."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self) -> str:
        """Return the last lines of all daemons."""
        texts = []
        for path in sorted(self.directory.glob("*.daemon")):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            texts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(texts)

    def stop(self) -> None:
        """End all daemons and jobs, and remove the namespaces and control groups."""
        for host in (*NODES, _CONTROLLER):
            self._kill(host)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        for host in (*NODES, _CONTROLLER):
            subprocess.run(["ip", "netns", "del", f"{self._prefix}-{host}"], capture_output=True)
        for groups in Path("/sys/fs/cgroup").glob("*/slurm*"):
            subprocess.run(
                ["find", str(groups), "-depth", "-type", "d", "-exec", "rmdir", "{}", ";"],
                capture_output=True,
            )

    def _connect(self, addresses: dict[str, int]) -> None:
        """Create the namespaces, and a bridge in the controller's namespace for all nodes."""

        def ip(host: str, *words: str) -> None:
            subprocess.run(["ip", "-n", f"{self._prefix}-{host}", *words], check=True)

        for host in addresses:
            subprocess.run(["ip", "netns", "add", f"{self._prefix}-{host}"], check=True)
            ip(host, "link", "set", "lo", "up")
        ip(_CONTROLLER, "link", "add", "br0", "type", "bridge")
        ip(_CONTROLLER, "addr", "add", f"{_NETWORK}.{addresses[_CONTROLLER]}/24", "dev", "br0")
        ip(_CONTROLLER, "link", "set", "br0", "up")
        for node in NODES:
            peer = ["type", "veth", "peer", "name", "eth0", "netns", f"{self._prefix}-{node}"]
            ip(_CONTROLLER, "link", "add", f"to-{node}", *peer)
            ip(_CONTROLLER, "link", "set", f"to-{node}", "master", "br0", "up")
            ip(node, "addr", "add", f"{_NETWORK}.{addresses[node]}/24", "dev", "eth0")
            ip(node, "link", "set", "eth0", "up")

    def _begin(self, name: str, command: list[str]) -> None:
        with open(self.directory / f"{name}.daemon", "ab") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=self._environment(), stdout=output, stderr=output, cwd="/"
            )

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLASHCKPT", "SLURM"))
        }
        return {**kept, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def _await(self, what: str, probe: object) -> None:
        assert callable(probe)
        deadline = time.monotonic() + PATIENCE_S
        while not probe():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}\n{self.log()}"
            time.sleep(0.1)

    def _kill(self, host: str) -> None:
        command = ["ip", "netns", "pids", f"{self._prefix}-{host}"]
        for _ in range(3):  # repeated for processes that were forked meanwhile
            done = subprocess.run(command, capture_output=True, text=True)
            for pid in map(int, done.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running(directory: Path, proctrack: Proctrack) -> Iterator[Cluster]:
    """Yield a running cluster; remove all of it afterwards."""
    cluster = Cluster(directory, proctrack)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
