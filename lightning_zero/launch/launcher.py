"""Who starts the ranks of a run, and what becomes of them.

[Ways of starting]
- *outside*: torchrun, srun, mpirun. Every rank exists already; what they say about themselves must agree with
  ``devices`` and ``num_nodes``.
- *popen*: the ranks 1.. of a machine execute the program again. Under Hydra they do not parse the command line, of
  which a sweep is part, but take the very config of the job that rank 0 runs. A
  :mod:`~lightning_zero.launch.supervisor` process watches them and rank 0.
- *spawn*, *fork*: all ranks are children of this process, which gets weights, metrics and predictions back. For
  programs that cannot be executed again: a notebook, pytest, ``python -c``.

[Session] What *popen* started, from the first run of a script (or of a Hydra job) to its end: a process group, child
processes, variables in the environment, a temporary folder. ``end_session`` takes all of it back.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lightning_zero.launch import restart, supervisor
from lightning_zero.launch.environment import adapt_environment, check_world
from lightning_zero.launch.step_sync import listen_early, sync_steps
from lightning_zero.private.check import check
from lightning_zero.private.lightning import (
    LIGHTNING,
    Collector,
    GlobalStateSnapshot,
    Launcher,
    SubprocessScriptLauncher,
    backend_of,
    choose_port_again,
    set_launcher,
    set_num_threads_if_needed,
    timeout_of,
)
from lightning_zero.private.torch import abort_process_groups

_CHILD = "LIGHTNING_ZERO_ERROR_FILE"
"""Set in ranks that a supervisor started: where they write what made them fail."""
_READY = ".ready"
_GRACE_SECONDS = {"clean": 60.0, "failed": 3.0, "preempted": 20.0}
"""How long rank 0's end leaves the others to end by themselves."""
_START_LIMIT = timedelta(seconds=300)
"""The least time that ranks have to find each other: importing on a busy file system takes minutes."""
_SET_FOR_RANKS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")

program_arguments: list[str] = []
"""What stands on the command line before Hydra's own arguments, if this program has such words."""


def choose_start_method(method: str) -> str:
    """``"popen"``, ``"spawn"`` or ``"fork"`` for ``method``, which may be ``"auto"``."""
    if method != "auto":
        return method
    if hasattr(sys, "ps1"):  # a notebook: what it defines cannot be imported by a spawned process
        return "fork"
    program = sys.modules["__main__"]
    if "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "spawn"  # to execute pytest again would run every test again
    if not getattr(program, "__file__", None):  # python -c, or read from a pipe
        return "fork"
    return "popen"


# -- popen -----------------------------------------------------------------------------------------------------------


class _Session:
    """The ranks that this process, rank 0 of its machine, has started."""

    def __init__(self, environment: Any, num_processes: int, num_nodes: int, log_folder: str | None) -> None:
        self.job = _hydra_output_dir()
        self.owner = os.getpid()
        self._before = {name: os.environ.get(name) for name in _SET_FOR_RANKS}
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
        first = environment.node_rank() * num_processes
        try:
            self._supervisor = self._start(num_processes, first)
        except BaseException:
            self._give_back()
            raise
        atexit.register(self._at_exit)

    def _start(self, num_processes: int, first: int) -> subprocess.Popen[bytes]:
        command, more_env = _program(Path(self._folder))
        if self._logs:
            Path(self._logs).mkdir(parents=True, exist_ok=True)
            self._copies = [_Copy(name, os.path.join(self._logs, f"rank{first}.log")) for name in ("stdout", "stderr")]
        ranks = []
        for local_rank in range(1, num_processes):
            rank = first + local_rank
            errors = os.path.join(self._folder, f"error{rank}.json")
            self._errors.append(errors)
            env = {**os.environ, **more_env, "LOCAL_RANK": str(local_rank), _CHILD: errors}
            log = os.path.join(self._logs, f"rank{rank}.log") if self._logs else None
            spec = {"rank": rank, "command": command, "env": env, "log": log, "errors": errors}
            ranks.append({**spec, "ready": str(Path(errors).with_suffix(_READY))})
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        stdout = os.dup(1)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[stdout],
                start_new_session=True,  # Ctrl-C is rank 0's alone
            )
        finally:
            os.close(stdout)
        plan = {"ranks": ranks, "cwd": os.getcwd(), "folder": self._folder, "stdout": stdout, "scratch": get_temp_dir()}
        assert process.stdin is not None
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        process.stdin.flush()
        threading.Thread(target=self._listen, args=(process,), daemon=True, name="lightning-zero-supervisor").start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.append(json.loads(line))
        self._has_ended.set()

    def wait_until_ready(self) -> None:
        """Until the other ranks have reached their own fit; one that fails before that is known at once."""
        deadline = time.monotonic() + _START_LIMIT.total_seconds()
        waiting = list(self._errors)
        while waiting := [path for path in waiting if not Path(path).with_suffix(_READY).exists()]:
            late = time.monotonic() > deadline
            if late or any("failed" in answer for answer in self._answers):
                failure = end_session("failed").get("failed") or {}
                if late:
                    raise TimeoutError(f"{len(waiting)} ranks did not come to their fit in {_START_LIMIT}.")
                raise RuntimeError(
                    f"rank {failure.get('rank')} {failure.get('what')} before the run began:\n{failure.get('text')}"
                )
            time.sleep(0.02)

    def end(self, how: str, failed_at: float | None = None) -> dict[str, Any]:
        """Ends the other ranks, gives the environment back, and says how they ended."""
        atexit.unregister(self._at_exit)
        if how == "clean" and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        seconds = _GRACE_SECONDS[how]
        request = {"do": "wait" if how == "clean" else "stop", "seconds": seconds, "failed_at": failed_at}
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._supervisor.stdin.write(json.dumps(request).encode() + b"\n")
            self._supervisor.stdin.close()
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
        failed = hasattr(sys, "last_type")
        answer = end_session("failed" if failed else "clean")
        if answer.get("failed") or answer.get("late"):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


_session: _Session | None = None


def end_session(how: str = "clean", failed_at: float | None = None) -> dict[str, Any]:
    """Ends what *popen* started in this process, if anything: processes, process group, variables, files.

    Args:
        how: ``"clean"`` waits for the other ranks to finish the program, ``"failed"`` ends them.
        failed_at: Seconds since the epoch at which this rank failed, to find out whether another did before.

    Returns:
        The supervisor's last words: ``ended`` (exit code by rank), ``failed`` (the rank that failed first), ``late``.
    """
    global _session
    session, _session = _session, None
    return session.end(how, failed_at) if session is not None and session.owner == os.getpid() else {}


class PopenLauncher(SubprocessScriptLauncher):
    """Starts the other ranks by executing the program again, unless they were started from outside.

    Args:
        strategy: Whose ``cluster_environment``, ``num_processes`` and ``num_nodes`` are meant, read when a run starts.
        log_folder: Where each rank's output goes, one file per rank; ``None``: ``ranks/`` in a Hydra job's folder,
            the terminal outside of Hydra.
    """

    def __init__(self, strategy: Any, log_folder: str | None = None) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._log_folder = log_folder
        _end_session_of_an_earlier_job()

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        _end_session_of_an_earlier_job()
        check_world(self.cluster_environment, self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally and self.num_processes > 1:
            global _session
            _drop_process_group()
            _session = _Session(self.cluster_environment, self.num_processes, self.num_nodes, self._log_folder)
            _session.wait_until_ready()
        elif errors := os.environ.get(_CHILD):
            Path(errors).with_suffix(_READY).write_text(get_temp_dir(), encoding="utf-8")
        set_num_threads_if_needed(num_processes=self.num_processes)
        if dist.is_available():
            atexit.unregister(destroy_process_group)
            atexit.register(destroy_process_group)
        args, kwargs = _continued(function, args, kwargs, trainer)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _write_error(error)
            _end_after(error)
            raise

    def kill(self, signum: int) -> None:
        """The supervisor ends the other ranks; signals that this rank receives are not theirs."""


def _continued(function: Callable[..., Any], args: Any, kwargs: Any, trainer: Any) -> tuple[Any, Any]:
    """A fit that was interrupted and started again by its batch system goes on from its newest checkpoint."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return args, kwargs
    bound = inspect.signature(function).bind(*args, **kwargs)
    if "ckpt_path" in inspect.signature(function).parameters and (path := restart.find()):
        bound.arguments["ckpt_path"] = path
    return bound.args, bound.kwargs


def _end_session_of_an_earlier_job() -> None:
    """In a sweep that runs in this process, each job has ranks of its own."""
    if _session is not None and _session.job != _hydra_output_dir():
        answer = end_session()
        if answer.get("failed"):
            raise RuntimeError(f"rank {answer['failed']['rank']} of an earlier job {answer['failed']['what']}.")


def _end_after(error: BaseException) -> None:
    if _session is None:
        return
    preempted = isinstance(error, SystemExit) and error.code == supervisor.PREEMPTED_EXIT_CODE
    answer = end_session("preempted" if preempted else "failed", failed_at=None if preempted else time.time())
    if (failure := answer.get("failed")) and hasattr(error, "add_note"):
        error.add_note(f"lightning_zero: rank {failure['rank']} failed before this one:\n{failure['text']}".rstrip())


def _write_error(error: BaseException) -> None:
    """For the supervisor, which cannot know why a rank ended."""
    path = os.environ.get(_CHILD)
    if not path or isinstance(error, (SystemExit, KeyboardInterrupt)):
        return
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"at": time.time(), "summary": summary, "traceback": traceback.format_exc()}, file)


def destroy_process_group() -> None:
    """Whatever its backend: sockets, threads and the store's port are given back before the interpreter goes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _drop_process_group() -> None:
    """What a failed job of a sweep has left in this process; its other ranks are gone."""
    if dist.is_initialized():
        if dist.is_nccl_available() and "nccl" in dist.get_backend_config():
            abort_process_groups()  # to destroy it would wait for them
        else:
            dist.destroy_process_group()


class _Copy:
    """Copies what Python writes to ``sys.<name>`` into a file as well."""

    def __init__(self, name: str, path: str) -> None:
        self._name, self._stream = name, getattr(sys, name)
        self._file = open(path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115
        setattr(sys, name, self)

    def write(self, text: str) -> Any:
        if not self._file.closed:
            self._file.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)
        self._file.close()


# -- what the other ranks execute --------------------------------------------------------------------------------------


def _program(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command of a rank and what it needs in its environment beside this process' own."""
    main: Any = sys.modules["__main__"]
    if main.__spec__ is None:
        command, env = [sys.executable, os.path.abspath(main.__file__)], {}
    else:  # found on a path of which the first entry was the working directory when the program began
        command = [sys.executable, "-m", main.__spec__.name]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if _hydra_output_dir() is None:
        return command + sys.argv[1:], env
    from lightning_zero.launch.hydra_job import job_command  # hydra is there: a job of it is running

    return job_command(command, folder), env


def _hydra_output_dir() -> str | None:
    """The folder of the Hydra job that is running, or ``None``; Hydra is not imported for the question."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    return str(module.HydraConfig.get().runtime.output_dir)


# -- spawn and fork --------------------------------------------------------------------------------------------------


class ProcessesLauncher(Launcher):
    """All ranks of a machine are children of this process, which gets back what they have made.

    Beyond Lightning's own: predictions of all ranks come back, not only rank 0's; nothing is left in the environment
    or in the temporary folder; a rank that fails ends the others within seconds.
    """

    def __init__(self, strategy: Any, start_method: Any) -> None:
        self._strategy = strategy
        self._start_method = start_method
        self._collector = Collector(strategy, start_method)
        self._folder = ""
        self._already_fit = False
        self.procs: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "procs": []}  # a process cannot be pickled

    @property
    def is_interactive_compatible(self) -> bool:
        return bool(self._start_method == "fork")

    def kill(self, signum: int) -> None:
        for process in self.procs:
            if process.is_alive():
                os.kill(process.pid, signum)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        environment: Any = self._strategy.cluster_environment
        check_world(environment, self._strategy.num_processes, getattr(self._strategy, "num_nodes", 1))
        if environment.creates_processes_externally:
            return function(*args, **kwargs)
        before = dict(os.environ)
        self._folder = self._collector.folder = tempfile.mkdtemp(prefix="lightning_zero-")
        try:
            os.environ["MASTER_PORT"] = str(environment.main_port)
            return self._launch(function, args, kwargs, trainer)
        finally:
            self.kill_all()
            shutil.rmtree(self._folder, ignore_errors=True)
            os.environ.clear()
            os.environ.update(before)
            choose_port_again(environment)

    def _launch(self, function: Callable[..., Any], args: Any, kwargs: Any, trainer: Any) -> Any:
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                f"start_method={self._start_method!r}: a second fit with the same Trainer would begin anew with the"
                " weights of the first; make a new Trainer and pass fit(ckpt_path=...)."
            )
        if self._start_method == "fork" and torch.cuda.is_initialized():
            raise RuntimeError(
                "start_method='fork': CUDA was used in this process before, so forked ones cannot use it. Restart the"
                " notebook and touch no CUDA tensor before fit, or use start_method='spawn'."
            )
        snapshot = GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        context: Any = mp.start_processes(
            self._rank,  # type: ignore[arg-type]
            args=(trainer, function, args, kwargs, snapshot),
            nprocs=self._strategy.num_processes,
            start_method=self._start_method,
            join=False,
        )
        self.procs = context.processes
        try:
            while not context.join(grace_period=_GRACE_SECONDS["failed"]):
                pass
        finally:
            for path in context.error_files:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        ranks = [self._read(f"rank{i}") for i in range(self._strategy.num_processes)]
        if trainer is None:
            return ranks[0]["results"]
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._collector.recover(ranks[0]["output"], trainer)
        if trainer.state.fn == TrainerFn.PREDICTING:
            return whole_predictions([rank["results"] for rank in ranks], ranks[0]["loaders"])
        return ranks[0]["results"]

    def _rank(
        self, process_idx: int, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any, snapshot: Any
    ) -> None:
        """What one rank does; its results go into files, as a queue would hold them in shared memory."""
        box: Any = _Box()
        results: list[Any] = []

        def call(*a: Any, **k: Any) -> Any:
            results.append(function(*a, **k))
            return results[0]

        self._collector.run_rank(process_idx, trainer, call, args, kwargs, box, snapshot)
        predicts = trainer is not None and trainer.state.fn == TrainerFn.PREDICTING
        loaders = trainer.predict_loop.num_dataloaders if predicts else 0
        self._write(f"rank{process_idx}", {"output": box.value, "results": results[0], "loaders": loaders})
        destroy_process_group()

    def _write(self, name: str, value: Any) -> None:
        torch.save(value, os.path.join(self._folder, name))

    def _read(self, name: str) -> Any:
        return torch.load(os.path.join(self._folder, name), map_location="cpu", weights_only=False)

    def kill_all(self) -> None:
        for process in self.procs:
            if process.is_alive():
                process.kill()
                process.join()


class _Box:
    """Takes the place of a queue that holds one thing."""

    value: Any = None

    def put(self, value: Any) -> None:
        self.value = value


def whole_predictions(of_ranks: list[Any], num_dataloaders: int = 1) -> Any:
    """The batches of all ranks in the order of the data: batch 0 of rank 0, of rank 1, ..., batch 1 of rank 0, ...

    Args:
        of_ranks: What ``Trainer.predict`` returned on each rank: ``None``, a list of batches' outputs, or, for several
            dataloaders, a list of such lists.
    """
    if any(result is None for result in of_ranks):
        return None
    if num_dataloaders > 1:
        return [whole_predictions(list(loader)) for loader in zip(*of_ranks, strict=True)]
    longest = max(map(len, of_ranks))
    return [result[i] for i in range(longest) for result in of_ranks if i < len(result)]


class Launched:
    """Mixin for ``DDPStrategy`` and what derives from it: how its ranks are started, watched and ended."""

    start_method = "auto"
    rank_logs: str | None = None
    cluster_environment_: Any = None

    @property
    def cluster_environment(self) -> Any:
        return self.cluster_environment_

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        self.cluster_environment_ = adapt_environment(environment)

    def setup_distributed(self) -> None:
        """As DDP's, but ranks that are still importing are waited for longer than a collective may take."""
        self.set_world_ranks()  # type: ignore[attr-defined]
        if not dist.is_initialized() and self.world_size > 1:  # type: ignore[attr-defined]
            environment = self.cluster_environment
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
            limit: timedelta = timeout_of(self) or default_pg_timeout  # type: ignore[arg-type]
            rank, size = self.global_rank, self.world_size  # type: ignore[attr-defined]
            backend = backend_of(self)
            rank_zero_info(f"Initializing distributed: {size} ranks, backend {backend}")
            store, *_ = next(rendezvous("env://", rank, size, timeout=max(limit, _START_LIMIT)))
            # torchrun keeps its store over a restart, with the addresses of the ranks that have died
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"lightning_zero/attempt_{attempt}", store)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=limit,
                device_id=self.root_device if self.root_device.type != "cpu" else None,  # type: ignore[attr-defined]
            )
        super().setup_distributed()  # type: ignore[misc]

    def _configure_launcher(self) -> None:
        check(LIGHTNING)
        listen_early()
        method = choose_start_method(self.start_method)
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            set_launcher(self, PopenLauncher(self, self.rank_logs))
        else:
            set_launcher(self, ProcessesLauncher(self, start_method=method))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
        self.note_checkpoint(checkpoint, filepath)

    def note_checkpoint(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Lets the run that continues this one find what was just stored."""
        if self.is_global_zero:  # type: ignore[attr-defined]
            try:
                restart.note(checkpoint, filepath)
            except OSError as error:  # the checkpoint itself is stored
                rank_zero_warn(f"A run that continues this one will not find {filepath} by itself: {error}")


class LaunchedDDP(Launched, DDPStrategy):
    """Lightning's DDP with this package's launching, watching and continuing."""

    def setup(self, trainer: Any) -> None:
        sync_steps(trainer, self)
        super().setup(trainer)
