"""A real Slurm of several nodes on one machine: a controller, and a slurmd for each node, in Linux namespaces.

Each node has a host name, mounts, System V IPC and a /dev/shm of its own, so MPI sees several machines; the network is
the machine's. All daemons and all that they run are in one PID namespace, whose first process waits for the end of its
standard input: whatever becomes of the program that has the cluster, the kernel ends every process of it.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from jobs.failing import processes_with
from mpi_session import HANG_SECONDS

__all__ = ["ClusterError", "EmulatedCluster"]

_TOOLS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurm-client": "sinfo",
    "munge": "munged",
    "util-linux": "unshare",
}
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_GPUS_PER_NODE = 2
_END_SECONDS = 10.0
_UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--propagation", "private")

# The first process of the cluster. MPI compares host names; and MPICH names its shared memory after the number of the
# step alone, so two nodes must not have the same /dev/shm.
_FIRST_PROCESS = """
set -e
hostname head
mount --bind hosts /etc/hosts
munged --foreground --force --key-file="$PWD/munge/key" --socket="$PWD/munge/socket" --pid-file="$PWD/munge/pid" \\
    --log-file="$PWD/log/munged" --seed-file="$PWD/munge/seed" >>log/munged.out 2>&1 </dev/null &
until [ -S munge/socket ]; do sleep 0.02; done
slurmctld -D -c >>log/slurmctld.out 2>&1 </dev/null &
for node in "$@"; do
    unshare --mount --uts --ipc --propagation private sh -c '
        hostname "$1" && mount -t tmpfs -o size=1g tmpfs /dev/shm && exec slurmd -D -N "$1"
        ' sh "$node" >>"log/slurmd.$node.out" 2>&1 </dev/null &
done
# the kernel buries orphans that come to a first process that ignores this; sh cannot be told to
exec env --ignore-signal=CHLD cat >/dev/null
"""

# There is no cgroup to follow a job's processes by, no database of accounts; the nodes have more CPUs than is true, and
# GPUs that are names in jobs' environments.
# A job starts, ends and starts again within a second. What became of it is known as long as the cluster lives.
_CONFIGURATION = """
ClusterName=emulated
SlurmctldHost=head(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
TmpFS={folder}/tmp/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
KillWait=2
CompleteWait=0
MessageTimeout=100
MinJobAge=36000
SlurmdTimeout=120
ReturnToService=2
MailProg=/bin/true
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
"""


class ClusterError(RuntimeError):
    """The cluster cannot be started, or a command of Slurm failed."""


@final
class EmulatedCluster:
    """Nodes `n1`, `n2`, ... under Slurm, from `with` to its end. Needs root. Each node claims `cpus_per_node`."""

    def __init__(self, num_nodes=3, cpus_per_node=4):
        self.nodes: Final = tuple(f"n{number}" for number in range(1, num_nodes + 1))
        self._cpus_per_node = cpus_per_node
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def missing():
        """Say what this machine lacks for a cluster; nothing if it can be started.

        Returns:
            A reason for a person, or "".
        """
        if not sys.platform.startswith("linux"):
            return f"namespaces are of Linux, and this is {sys.platform}"
        if os.geteuid() != 0:
            return "only root may make namespaces"
        for package, tool in _TOOLS.items():
            if shutil.which(tool, path=_SYSTEM_PATH) is None:
                return f"there is no {tool}, of the package {package}"
        if not [*Path("/usr").glob("lib*/libpmix.so"), *Path("/usr/lib").glob("*/libpmix.so")]:
            return "there is no libpmix.so, of the package libpmix-dev"  # srun loads it by this name
        tried = subprocess.run([*_UNSHARE, "--pid", "--fork", "true"], capture_output=True, text=True, check=False)
        return tried.stderr.strip()

    @property
    def environment(self):
        """The variables with which commands of Slurm reach the cluster."""
        return {"SLURM_CONF": str(self._folder / "slurm.conf"), "TMPDIR": str(self._folder / "tmp")}

    def __enter__(self):
        # Not where TMPDIR points: sockets lie below it, and their paths must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        try:
            self._write_files()
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_):
        self._end()

    def call(self, *command):
        """Run a command of Slurm, such as `scontrol show nodes`.

        Returns:
            What the command printed.

        Raises:
            ClusterError: If the command failed.
        """
        environment = {"PATH": _SYSTEM_PATH, **self.environment}
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or f'it ended with {done.returncode}'}")
        return done.stdout

    def lose(self, node):
        """End all processes of a node at once, as when its power fails. The controller is not told, and it stays so."""
        commands = processes_with(**self.environment)
        slurmd, *_ = (pid for pid in commands if commands[pid] == f"slurmd -D -N {node}")  # and what it has just forked
        uts = os.stat(f"/proc/{slurmd}/ns/uts").st_ino
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is none of this cluster
                if os.stat(process / "ns" / "uts").st_ino == uts:
                    os.kill(int(process.name), signal.SIGKILL)

    def _write_files(self):
        self._folder.chmod(0o755)
        for name in ("log", "munge", "spool", "state", "tmp", *(f"tmp/{node}" for node in self.nodes)):
            (self._folder / name).mkdir(mode=0o755)
        key = self._folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        ports = _free_ports(1 + len(self.nodes))
        nodes = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus_per_node}"
            f" Gres=gpu:{_GPUS_PER_NODE}"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        text = _CONFIGURATION.format(folder=self._folder, ports=ports, nodes="\n".join(nodes))
        (self._folder / "slurm.conf").write_text(text)
        gpus = [self._folder / f"gpu{number}" for number in range(_GPUS_PER_NODE)]
        for gpu in gpus:
            gpu.symlink_to(os.devnull)  # must be a device
        lines = [f"Name=gpu File={gpu} Flags=nvidia_gpu_env\n" for gpu in gpus]
        (self._folder / "gres.conf").write_text("".join(lines))
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        hosts = ["127.0.0.1 localhost", *(f"127.0.0.1 {name}" for name in ("head", *self.nodes))]
        (self._folder / "hosts").write_text("\n".join(hosts) + "\n")

    def _start(self):
        command = [*_UNSHARE, "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _FIRST_PROCESS, "sh"]
        with (self._folder / "log" / "first").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *self.nodes],
                cwd=self._folder,
                env={"PATH": _SYSTEM_PATH, "LC_ALL": "C", **self.environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the program, which ends the cluster
            )
        limit = time.monotonic() + HANG_SECONDS
        while not self._is_up():
            if time.monotonic() > limit or self._process.poll() is not None:
                raise ClusterError(f"Slurm did not start: {self._log()}")
            time.sleep(0.05)

    def _is_up(self):
        try:
            idle = self.call("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        except ClusterError:  # the controller does not answer yet
            return False
        return set(idle.split()) == {*self.nodes}

    def _end(self):
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the first process ends, and all others with it
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()  # --kill-child
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _log(self):
        """Return the last lines that each daemon wrote."""
        tails = []
        for path in sorted((self._folder / "log").iterdir()):
            lines = path.read_text(errors="replace").strip().splitlines()[-5:]
            tails += [f"{path.name}: {line}" for line in lines]
        return "\n".join(tails)


def _free_ports(number):
    """Find ports of TCP that nobody listens on, below those that the kernel gives to whoever asks for any."""
    ports = set[int]()
    while len(ports) < number:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as one, suppress(OSError):  # another program has it
            one.bind(("127.0.0.1", port))
            ports.add(port)
    return [*ports]
