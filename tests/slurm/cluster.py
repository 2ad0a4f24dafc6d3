"""A real Slurm on this machine: one slurmctld and several slurmd, each a node with a host name of its own.

Slurm's own daemons with their own ports and folders, nothing of the machine's /etc is read or changed. It works as root
and as a plain user, starts in less than a second, and every process is ended by its id. What differs from a cluster:
one kernel, one clock and one file system; fake GPUs (character devices that nothing can compute on); no accounting.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from forks import free_port
from limits import limit
from processes import kill

SMALL_DISK = "small"
"""Folder of a cluster that may be a file system of its own, of 40 MiB."""
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin"
DEADLINE = limit(600.0)
"""Seconds after which anything that is waited for counts as hung."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# A requeued job waits for this long; 5 is the least that Slurm accepts.
AuthInfo=cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
PlugStackConfig={root}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
# How soon a dead node is noticed.
SlurmdTimeout={silence}
MessageTimeout=4
TCPTimeout=2
KillWait={kill_wait}
UnkillableStepTimeout=120
MinJobAge=3600
CompleteWait=0
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """What lacks for a cluster, with the command that installs it; empty when nothing does."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=SEARCH)]
    if absent:
        return f"Slurm is not installed (no {', '.join(absent)}): {INSTALL}"
    if subprocess.run([*_namespaces(), "true"], capture_output=True).returncode:
        return f"namespaces are not permitted here ({' '.join(_namespaces())} fails): run as root, or permit them"
    return ""


class Cluster:
    """Slurm daemons below `root`, which must be a short path: Unix sockets lie in it.

    A node is dead after `silence` seconds.
    """

    def __init__(
        self, root: Path, nodes: int, cpus: int = 16, gpus: int = 0, kill_wait: int = 60, silence: int = 5
    ) -> None:
        self.root = root.resolve()
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # Clients see this cluster, and nothing of a job that the tests themselves may run in.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.environment |= {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": SEARCH}
        self._write(cpus, gpus, kill_wait, silence)

    def _write(self, cpus: int, gpus: int, kill_wait: int, silence: int) -> None:
        for folder in ("state", "log", "run", "dev", *(f"spool/{node}" for node in self.nodes)):
            (self.root / folder).mkdir(parents=True)
        first, *ports = (free_port() for _ in range(1 + len(self.nodes)))
        config = CONFIG.format(port=first, user=getpass.getuser(), root=self.root, kill_wait=kill_wait, silence=silence)
        resources = f"CPUs={cpus} RealMemory=64000 Feature=tests" + (f" Gres=gpu:{gpus}" if gpus else "")
        for node, port in zip(self.nodes, ports, strict=True):
            config += f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} {resources}\n"
        names = f"NodeName={','.join(self.nodes)} Name=gpu File={self._devices(gpus)}\n"
        files = {"slurm.conf": config, "gres.conf": names if gpus else "", "plugstack.conf": "", "cgroup.conf": ""}
        files["hosts"] = f"127.0.0.1 localhost {' '.join(self.nodes)}\n"
        for name, text in files.items():
            (self.root / name).write_text(text)

    def _devices(self, gpus: int) -> str:
        """Device files that pass for GPUs: Slurm only looks at their kind."""
        if os.getuid():
            return f"/dev/tty[0-{gpus - 1}]"
        for number in range(gpus):
            os.mknod(self.root / "dev" / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        return f"{self.root}/dev/gpu[0-{gpus - 1}]"

    def start(self) -> Cluster:
        """Starts the daemons and waits until every node is idle."""
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self._until(lambda: set(self.run("sinfo", "-h", "-N", "-o", "%t").stdout.split()) == {"idle"})
        return self

    def start_controller(self) -> None:
        """Starts slurmctld, with the state that it left if it ran before."""
        self._spawn("slurmctld", [_program("slurmctld"), "-D"])
        self._until(lambda: self.run("scontrol", "ping").returncode == 0)

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """slurmctld saves its state and ends, and comes back afterwards."""
        self._daemons["slurmctld"].terminate()
        self._daemons["slurmctld"].wait()
        try:
            yield
        finally:
            self.start_controller()

    def start_node(self, node: str, prepare: str = "true") -> None:
        """Starts a node in namespaces of its own, after the shell command `prepare` was run in them.

        Steps inherit the namespaces: the host name, /etc/hosts, and whatever `prepare` mounts.
        """
        inside = f'hostname {node} && mount --bind {self.root}/hosts /etc/hosts && {prepare} && exec "$@"'
        command = [_program("slurmd"), "-D", "-N", node]
        if os.getuid():  # root in the user namespace for the edits, then this user again: slurmd insists
            ids = [f"--map-user={os.getuid()}", f"--map-group={os.getgid()}"]
            command = ["unshare", "--user", *ids, *command]
        self._spawn(node, [*_namespaces(), "sh", "-c", inside, "sh", *command])

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.root, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            ended = {name: daemon.returncode for name, daemon in self._daemons.items() if daemon.poll() is not None}
            if ended or time.monotonic() > deadline:
                texts = "".join(file.read_text()[-1500:] for file in sorted((self.root / "log").glob("*.out")))
                self.stop()
                raise RuntimeError(f"Slurm did not start; ended: {ended}\n{texts}")
            time.sleep(0.02)

    def kill_node(self, node: str) -> None:
        """A node loses its power: SIGKILL to its slurmd and everything that it started."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        while left := self.processes([node]):  # one that is killed may have begun another a moment before
            for process in left:
                kill(process)
            psutil.wait_procs(left, timeout=1)

    def revive(self) -> None:
        """Starts the nodes again that were killed, and waits until all are idle."""
        for node in self.nodes:
            if self._daemons[node].poll() is not None:
                self.start_node(node)
        self.wait_idle()

    def wait_idle(self) -> None:
        """Waits until every node is idle."""
        wait_until(lambda: set(self.node_states().values()) == {"idle"}, "not every node is idle")

    def stop(self) -> None:
        """SIGKILL to everything: the state is thrown away, nobody is owed a clean end."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        while left := self.processes():
            for process in left:
                kill(process)
            psutil.wait_procs(left, timeout=1)

    def processes(self, nodes: Iterable[str] | None = None) -> list[psutil.Process]:
        """All that the steps of jobs left running on these nodes, slurmstepds first."""
        nodes = set(self.nodes if nodes is None else nodes)
        daemons = {daemon.pid for daemon in self._daemons.values()}
        steps: list[psutil.Process] = []
        others: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended meanwhile
                if process.pid in daemons or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                is_step = process.name().startswith("slurmstepd")
                if (self._node_of_step(process) if is_step else self._node(process)) in nodes:
                    (steps if is_step else others).append(process)
        return steps + others

    def _node(self, process: psutil.Process) -> str | None:
        own = process.environ()
        return own.get("SLURMD_NODENAME") if own.get("SLURM_CONF") == self.environment["SLURM_CONF"] else None

    def _node_of_step(self, process: psutil.Process) -> str | None:
        """A slurmstepd wipes its environment, but holds its node's log open."""
        links = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
        return next((node for node in self.nodes if f"{self.root}/log/slurmd-{node}.log" in links), None)

    def running(self, script: Path | str, nodes: Iterable[str] | None = None) -> list[psutil.Process]:
        """The shells among `processes` that run a script whose path ends with this."""
        found = []
        for process in self.processes(nodes):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if len(words) > 1 and Path(words[1]).parts[-len(Path(script).parts) :] == Path(script).parts:
                    found.append(process)
        return found

    def run(self, *command: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """A client command, to its end."""
        name, *rest = map(str, command)
        return subprocess.run(
            [_program(name), *rest], env=self.environment | environment, cwd=cwd or self.root, text=True,
            capture_output=True, timeout=DEADLINE,
        )  # fmt: skip

    def node_states(self) -> dict[str, str]:
        """Node -> Slurm's short word for its state."""
        lines = self._ask("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self._ask("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: int, states: Sequence[str] = ENDED) -> dict[str, str]:
        """Waits until a job is in one of the states."""
        there = f"job {number} is not {' or '.join(states)}"
        return wait_until(lambda: (job := self.job(number))["JobState"] in states and job, there)

    def jobs(self) -> list[int]:
        """Jobs that are queued or run."""
        return [int(line) for line in self._ask("squeue", "-h", "-o", "%i").split()]

    def _ask(self, *command: object) -> str:
        """What a client says of the state; a controller with much to do is asked again."""
        said = []
        wait_until(lambda: said.append(self.run(*command)) or not said[-1].returncode, "the controller does not answer")
        return said[-1].stdout


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Polls until `condition` holds, and returns what it then is.

    Raises:
        TimeoutError: It did not become true in time; says `what`.
    """
    deadline = time.monotonic() + DEADLINE
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.1)
    return found


def _namespaces() -> list[str]:
    """Starts a program with a host name and mounts of its own."""
    return ["unshare", "--uts", "--mount", *(["--user", "--map-root-user"] if os.getuid() else [])]


def _program(name: str) -> str:
    return shutil.which(name, path=SEARCH) or name
