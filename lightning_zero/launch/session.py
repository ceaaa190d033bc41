"""The ranks of one machine that its rank 0 has started by executing the program again (*popen*).

A session lasts from the first run of a script (or of a Hydra job) to its end: a process group, child processes,
variables in the environment, a temporary folder, a pipe for signals. ``end_session`` takes all of it back.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_zero.launch import rendezvous, supervisor
from lightning_zero.launch.failure import RANK_LOG
from lightning_zero.launch.interrupt import Presses, watch
from lightning_zero.private.lightning import set_main_port

ERROR_FILE = "LIGHTNING_ZERO_ERROR_FILE"
"""Set in ranks that a supervisor started: where they write what made them fail."""
_READY = ".ready"
GRACE_SECONDS = {"clean": 60.0, "failed": 3.0, "preempted": 20.0, "interrupted": 0.3}
"""Seconds that the others get to end by themselves, by the way in which rank 0 ended."""
_SET_FOR_RANKS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


class Session:
    """The ranks that this process, rank 0 of its machine, has started."""

    def __init__(
        self, environment: Any, num_processes: int, num_nodes: int, log_folder: str | None, words: list[str]
    ) -> None:
        self.job = hydra_output_dir()
        self.owner = os.getpid()
        self.how: str | None = None
        """``"failed"`` when all ranks have raised and none has begun another run yet."""
        self.failed_rank: dict[str, Any] | None = None
        self._before = {name: os.environ.get(name) for name in _SET_FOR_RANKS}
        rendezvous.forget()
        if environment.node_rank() == 0:
            _open_store(environment, num_nodes)
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK=str(environment.node_rank()),
            LOCAL_RANK="0",
            WORLD_SIZE=str(num_processes * num_nodes),
        )
        self._folder = tempfile.mkdtemp(prefix="lightning_zero-")
        self._logs = log_folder or (os.path.join(self.job, "ranks") if self.job else None)
        self._answers: list[dict[str, Any]] = []
        self._has_ended = threading.Event()
        self._copies: list[_Copy] = []
        self._errors: list[str] = []
        self._presses = Presses(self._stop_now)
        self.first_rank = environment.node_rank() * num_processes
        try:
            self._supervisor = self._start(num_processes, self.first_rank, words)
        except BaseException:
            self._give_back()
            raise
        watch(self._presses)
        atexit.register(self._at_exit)

    def _start(self, num_processes: int, first: int, words: list[str]) -> subprocess.Popen[bytes]:
        command, more_env = _program(Path(self._folder), words)
        if self._logs:
            Path(self._logs).mkdir(parents=True, exist_ok=True)
            self._copies = [_Copy(name, os.path.join(self._logs, f"rank{first}.log")) for name in ("stdout", "stderr")]
            self.copy_output()
        ranks = []
        for local_rank in range(1, num_processes):
            rank = first + local_rank
            errors = os.path.join(self._folder, f"error{rank}.json")
            self._errors.append(errors)
            log = os.path.join(self._logs, f"rank{rank}.log") if self._logs else None
            env = {**os.environ, **more_env, "LOCAL_RANK": str(local_rank), ERROR_FILE: errors, RANK_LOG: log or ""}
            spec = {"rank": rank, "command": command, "env": env, "log": log, "errors": errors}
            ranks.append({**spec, "ready": str(Path(errors).with_suffix(_READY))})
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        stdout = os.dup(1)
        pipe = self._presses.pipe
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[stdout, *([] if pipe is None else [pipe])],
                start_new_session=True,  # Ctrl-C is rank 0's alone
            )
        finally:
            os.close(stdout)
        plan = {"ranks": ranks, "cwd": os.getcwd(), "folder": self._folder, "stdout": stdout, "signals": pipe}
        plan |= {"scratch": get_temp_dir(), "rank0": first}
        assert process.stdin is not None
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        process.stdin.flush()
        threading.Thread(target=self._listen, args=(process,), daemon=True, name="lightning-zero-supervisor").start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            if "signal" in answer:
                self._presses.on_signal(answer["signal"])
            self._answers.append(answer)
        self._has_ended.set()

    @property
    def first_failure(self) -> dict[str, Any] | None:
        """The rank that failed first, if the supervisor has said that one did."""
        return next((answer["failed"] for answer in self._answers if answer.get("failed")), None)

    def lacks_a_rank(self) -> bool:
        """Whether another rank has ended."""
        return any("failed" in answer or "exited" in answer for answer in self._answers)

    def wait_until_ready(self, launch: int) -> None:
        """Until the other ranks have reached run number ``launch`` as well; one that fails before that is known at
        once."""
        seconds = rendezvous.start_seconds()
        deadline = time.monotonic() + seconds
        waiting = [ready_file(path, launch) for path in self._errors]
        while waiting := [path for path in waiting if not path.exists()]:
            late = time.monotonic() > deadline
            if late or self.lacks_a_rank():
                found = end_session("failed").get("failed") or self.first_failure or {}
                self.failed_rank = found
                if late:
                    raise TimeoutError(
                        f"{len(waiting)} ranks did not come to their fit in {seconds:.0f} s. More patience:"
                        f" {rendezvous.START_SECONDS}={2 * seconds:g}."
                    )
                raise rendezvous.RankLost(
                    f"rank {found.get('rank')} {found.get('what', 'ended')} before the run began (shown above)."
                )
            time.sleep(0.02)

    def copy_output(self) -> None:
        """A run begins: until :meth:`stop_copying` this rank's log gets what Python writes to the terminal."""
        for copy in self._copies:
            copy.begin()

    def stop_copying(self) -> None:
        """The run is over: the program has its own streams."""
        for copy in self._copies:
            copy.end()

    def log(self, text: str) -> None:
        """Writes ``text`` into this rank's log, if there is one, and not to the terminal."""
        for copy in self._copies[-1:]:
            copy.log(text)

    def _ask_for_end(self, request: dict[str, Any]) -> None:
        stdin = self._supervisor.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.close()

    def _stop_now(self) -> None:
        self._ask_for_end({"do": "stop", "seconds": 0.0})
        self._has_ended.wait(0.5)

    def end(self, how: str, failed_at: float | None = None) -> dict[str, Any]:
        """Ends the other ranks, gives the environment back, and says how they ended."""
        atexit.unregister(self._at_exit)
        self._presses.is_ending = True
        if how == "clean" and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        seconds = GRACE_SECONDS[how]
        self._ask_for_end({"do": "wait" if how == "clean" else "stop", "seconds": seconds, "failed_at": failed_at})
        self._has_ended.wait(seconds + supervisor.BLAME_SECONDS + 10.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(5.0)
        if self._supervisor.poll() is None:
            self._supervisor.kill()
        assert self._supervisor.stdout is not None
        self._supervisor.stdout.close()
        self._give_back()
        return next((answer for answer in reversed(self._answers) if "ended" in answer), {})

    def _give_back(self) -> None:
        self._presses.close()
        watch(None)
        rendezvous.forget()
        shutil.rmtree(self._folder, ignore_errors=True)  # normally the supervisor's last act
        for copy in self._copies:
            copy.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _at_exit(self) -> None:
        if os.getpid() != self.owner:  # a forked data loader worker
            return
        # Set by the interpreter when it is about to end with an uncaught exception, after a run that was fine
        how = "failed" if hasattr(sys, "last_type") else "clean"
        answer = end_session(how)
        if how == "clean" and (answer.get("failed") or answer.get("late")):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


_session: Session | None = None


def current() -> Session | None:
    """The session of this process, if it has one."""
    return _session if _session is not None and _session.owner == os.getpid() else None


def start_session(
    environment: Any, num_processes: int, num_nodes: int, log_folder: str | None, words: list[str]
) -> Session:
    """Starts the other ranks of this machine.

    Args:
        environment: Lightning's, which knows address, port and number of this machine.
        num_processes, num_nodes: Ranks per machine, machines.
        log_folder: One file per rank; ``None`` for a Hydra job's own folder, or the terminal.
        words: What stands on the command line before Hydra's arguments.
    """
    global _session
    _session = Session(environment, num_processes, num_nodes, log_folder, words)
    return _session


def end_session(how: str = "clean", failed_at: float | None = None) -> dict[str, Any]:
    """Ends what *popen* started in this process, if anything: processes, process group, variables, files.

    Args:
        how: A key of :data:`GRACE_SECONDS`: ``"clean"`` waits for the other ranks to finish the program, the others end
            them.
        failed_at: Seconds since the epoch at which this rank failed, to find out whether another did before.

    Returns:
        The supervisor's last words: ``ended`` (exit code by rank), ``failed`` (the rank that failed first), ``late``.
    """
    global _session
    session, _session = _session, None
    return session.end(how, failed_at) if session is not None and session.owner == os.getpid() else {}


def ready_file(errors: str, launch: int) -> Path:
    """The file that a rank makes when it has come to the ``launch``-th run of the program."""
    return Path(errors).with_suffix(f"{_READY}{launch if launch > 1 else ''}")


def _open_store(environment: Any, num_nodes: int) -> None:
    """Opens the ranks' store before there are ranks: then nobody can take its port in between."""
    is_free = type(environment) is LightningEnvironment and num_nodes == 1 and "MASTER_PORT" not in os.environ
    if is_free and "STANDALONE_PORT" not in os.environ:
        set_main_port(environment, rendezvous.serve(environment.main_address))
    else:
        rendezvous.serve(environment.main_address, environment.main_port)


class _Copy:
    """Copies what Python writes to ``sys.<name>`` into a file as well, from :meth:`begin` to :meth:`end`. Whoever keeps
    the object, such as a logging handler that was made in between, writes to the stream for ever."""

    def __init__(self, name: str, path: str) -> None:
        self._name, self._stream = name, getattr(sys, name)
        self._file = open(path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115

    def begin(self) -> None:
        """Takes the place of the stream that is there now: it may be another one in each run."""
        stream = getattr(sys, self._name)
        if stream is not self:  # a run inside a run
            self._stream = stream
            setattr(sys, self._name, self)

    def end(self) -> None:
        """Puts the stream back, unless somebody else has put one there meanwhile."""
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)

    def write(self, text: str) -> Any:
        if not self._file.closed:
            self._file.write(text)
        return self._stream.write(text)

    def log(self, text: str) -> None:
        """Into the file alone."""
        if not self._file.closed:
            self._file.write(text)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        self.end()
        self._file.close()


# -- what the other ranks execute --------------------------------------------------------------------------------------


def _program(folder: Path, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command of a rank and what it needs in its environment beside this process' own."""
    main: Any = sys.modules["__main__"]
    if main.__spec__ is None:
        command, env = [sys.executable, os.path.abspath(main.__file__)], {}
    else:  # found on a path of which the first entry was the working directory when the program began
        command = [sys.executable, "-m", main.__spec__.name]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if hydra_output_dir() is None:
        return command + sys.argv[1:], env
    from lightning_zero.launch.hydra_job import job_command  # hydra is there: a job of it is running

    return job_command(command, folder, words), env


def hydra_output_dir() -> str | None:
    """The folder of the Hydra job that is running, or ``None``; Hydra is not imported for the question."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    return str(module.HydraConfig.get().runtime.output_dir)
