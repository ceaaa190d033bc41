"""A SLURM of one's own: ``munged``, ``slurmctld`` and ``slurmd`` on this machine, everything in one folder.

For tests and for the page about requeueing. Needs root and Debian's ``slurm-wlm`` and ``munge``; no cgroups, no
accounting, nothing outside of the folder. Meant to run for minutes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.system.commands import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
START_SECONDS = 60.0


def why_not() -> str | None:
    """The reason why no SLURM can be started here, or ``None``."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm munge)"
    return None if os.getuid() == 0 else "starting slurmd takes root"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class Slurm:
    """A running SLURM of one node with two CPUs."""

    env: dict[str, str]

    def run(self, *command: str, timeout_seconds: float = 60.0, cwd: Path | None = None) -> str:
        """Output of a SLURM command; raises if it fails."""
        done = subprocess.run(
            command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol`` says about a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Starts it, and ends every process of it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    for name in [name for name in env if name.startswith("SLURM_") and name != "SLURM_CONF"]:
        del env[name]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        socket_path = _munge(folder, env, processes)
        host = socket.gethostname().split(".")[0]
        (folder / "slurm.conf").write_text(_config(folder, host, socket_path))
        for name in ("state", "spool"):
            (folder / name).mkdir()
        _start(["slurmctld", "-D"], folder, env, processes)
        _start(["slurmd", "-D", "-N", host], folder, env, processes)
        slurm = Slurm(env)
        _wait_until_idle(slurm, folder)
        try:
            yield slurm
        finally:
            with contextlib.suppress(RuntimeError):
                slurm.run("scancel", "--full", "--signal=KILL", "--user=root")
                time.sleep(1.0)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start(command: list[str], folder: Path, env: dict[str, str], processes: list[subprocess.Popen[bytes]]) -> None:
    with open(folder / f"{command[0]}.out", "wb") as log:
        processes.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", shutil.which(command[0], path=_path()) or command[0], *command[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )


def _munge(folder: Path, env: dict[str, str], processes: list[subprocess.Popen[bytes]]) -> Path:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    options = [f"--{name}={folder / file}" for name, file in {**names, "seed-file": "munge.seed"}.items()]
    _start(["munged", "--foreground", "--force", *options], folder, env, processes)
    if not wait_until((folder / "munge.socket").exists, START_SECONDS):
        raise RuntimeError(f"munged did not start:\n{(folder / 'munged.out').read_text()}")
    return folder / "munge.socket"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def _config(folder: Path, host: str, munge_socket: Path) -> str:
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
SlurmUser=root
AuthType=auth/munge
# a requeued job waits until its credentials have expired, otherwise two minutes
AuthInfo=socket={munge_socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def _wait_until_idle(slurm: Slurm, folder: Path) -> None:
    def is_idle() -> bool:
        with contextlib.suppress(RuntimeError):
            return {*slurm.run("sinfo", "--Node", "--noheader", "--format=%T").split()} <= {"idle", "mixed"}
        return False

    if not wait_until(is_idle, START_SECONDS):
        logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("slurm*.log"))
        raise RuntimeError(f"SLURM did not become idle:\n{logs}")
