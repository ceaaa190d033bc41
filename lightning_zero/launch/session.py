"""A session: the ranks of one machine that its first rank has started by executing the program again (*popen*).

A session lasts from the first run of a script (or of a Hydra job) to the script's end. It owns a process group, child
processes, environment variables and a temporary folder. ``end_session`` releases all of them.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_zero.launch import rendezvous, supervisor
from lightning_zero.launch.restart import hydra_folders

_ANSWER_SECONDS = 10.0
"""Seconds in which the supervisor must end the ranks and answer, after the time that it gives them."""
_SET_FOR_RANKS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", supervisor.ERROR_FILE)
program_arguments: list[str] = []
"""The command-line arguments that come before Hydra's own, if this program has any."""


class Session:
    """The ranks that this process, the first rank of its machine, has started.

    Args:
        environment: Lightning's cluster environment, which has the address, the port and this machine's number.
        num_processes, num_nodes: Ranks per machine, and machines.
        log_folder: Folder for one log per rank. ``None`` is the folder of a Hydra job, or else the terminal.
    """

    def __init__(self, environment: Any, num_processes: int, num_nodes: int, log_folder: str | None) -> None:
        self.job = hydra_output_dir()
        self.owner = os.getpid()
        first_rank = environment.node_rank() * num_processes
        if log_folder := log_folder or (os.path.join(self.job, "ranks") if self.job else None):
            Path(log_folder).mkdir(parents=True, exist_ok=True)
        self._logs = [
            os.path.join(log_folder, f"rank{first_rank + local_rank}.log") if log_folder else ""
            for local_rank in range(num_processes)
        ]
        self._before = {name: os.environ.get(name) for name in _SET_FOR_RANKS}
        rendezvous.forget()
        if environment.node_rank() == 0:
            # Now, so that no other program takes the port until the ranks connect
            rendezvous.serve(environment.main_address, environment.main_port)
        self._folder = tempfile.mkdtemp(prefix="lightning_zero-")
        values = environment.main_address, environment.main_port, environment.node_rank(), 0, num_processes * num_nodes
        for name, value in zip(_SET_FOR_RANKS, (*values, supervisor.error_file(self._folder, first_rank)), strict=True):
            os.environ[name] = str(value)
        try:
            self._supervisor = self._start(first_rank)
        except BaseException:
            self._give_back()
            raise
        atexit.register(self._at_exit)

    def _start(self, first_rank: int) -> subprocess.Popen[bytes]:
        command, env = _program()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        stdout = os.dup(1)
        job = hydra_folders()  # a Hydra job may have changed to its own folder
        cwd = os.getcwd() if job is None else str(job.cwd)
        plan = {"command": command, "cwd": cwd, "env": env, "stdout": stdout}
        plan |= {"folder": self._folder, "rank0": first_rank, "pid": self.owner, "logs": self._logs[1:]}
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[stdout],
            )
        finally:
            os.close(stdout)

    def log(self, text: str) -> None:
        """Writes ``text`` into this rank's log if there is one, and never to the terminal."""
        if self._logs[0]:
            with open(self._logs[0], "a", encoding="utf-8", errors="replace") as file:
                file.write(text)

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, failed: bool) -> str:
        """Ends the other ranks, restores the environment, and returns the failure that the supervisor has shown."""
        atexit.unregister(self._at_exit)
        if not failed and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        limit = supervisor.SECONDS[supervisor.State.FINISHING] + _ANSWER_SECONDS
        try:
            answer, _ = self._supervisor.communicate(b"rank 0 failed" if failed else b"rank 0 done", limit)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            answer, _ = self._supervisor.communicate()
        self._give_back()
        return answer.decode().strip()

    def _give_back(self) -> None:
        rendezvous.forget()
        shutil.rmtree(self._folder, ignore_errors=True)  # normally the supervisor's last act
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _at_exit(self) -> None:
        if os.getpid() != self.owner:  # a forked data loader worker
            return
        # The interpreter sets last_type when it ends with an uncaught exception, here one after a successful run
        failed = hasattr(sys, "last_type")
        if end_session(failed) and not failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


_session: Session | None = None


def current() -> Session | None:
    """Returns the session of this process, if it has one."""
    return _session if _session is not None and _session.owner == os.getpid() else None


def start_session(environment: Any, num_processes: int, num_nodes: int, log_folder: str | None) -> None:
    """Starts the other ranks of this machine. The arguments are those of :class:`Session`."""
    global _session
    _session = Session(environment, num_processes, num_nodes, log_folder)


def end_session(failed: bool = False) -> str:
    """Ends the session of this process, if any: processes, process group, variables, files.

    Args:
        failed: End the other ranks at once, instead of waiting until they finish the program.

    Returns:
        The failure that has ended the run, in one line, which the supervisor has shown; empty if there was none.
    """
    global _session
    session, _session = _session, None
    return session.end(failed) if session is not None and session.owner == os.getpid() else ""


# -- the command of the other ranks ------------------------------------------------------------------------------------


def _program() -> tuple[list[str], dict[str, str]]:
    """Returns the command of a rank, and the environment variables that it needs in addition to this process's."""
    main: Any = sys.modules["__main__"]
    if main.__spec__ is None:
        command, env = [sys.executable, os.path.abspath(main.__file__)], {}
    else:  # python -m found the module relative to the working directory at that time, which sys.path holds
        command = [sys.executable, "-m", main.__spec__.name]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if hydra_output_dir() is None:
        return command + sys.argv[1:], env
    from lightning_zero.launch.hydra_job import job_command  # imports hydra, which is installed: its job is running

    return job_command([*command, *program_arguments]), env


def hydra_output_dir() -> str | None:
    """Returns the folder of the running Hydra job, or ``None``."""
    job = hydra_folders()
    return None if job is None else str(job.output_dir)
