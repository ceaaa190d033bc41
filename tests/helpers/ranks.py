"""Runs a function on several ranks, each a process of its own, as ``torchrun`` would start them.

Glossary:
    job       one call ``fn(*args)`` made on every rank at once; ``fn`` is importable by name, ``args`` are picklable.
    worker    a process that stays alive between jobs.
    pool      the workers; job after job it uses the first ``world_size`` of them, so one pool serves every world size.
    template  the process that workers are forked from (Python's forkserver): it has imported what takes seconds, which
              :mod:`tests.helpers.preloaded` lists, and has run nothing.

A job begins in a clean process: environment as torchrun sets it with a fresh ``MASTER_PORT``, no process group, fixed
seeds. What it returns comes back as one list, by rank. If a rank raises or dies, the others (which probably hang in a
collective) are killed and :class:`RankError` shows the first rank's traceback; if time runs out, every rank's stack.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STARTUP_SECONDS = 50.0
"""Importing torch and lightning on a busy machine."""
GRACE_SECONDS = 0.3
"""After the first failure: how long other ranks may still report theirs, and stacks may still be written."""
LOG_TAIL_CHARACTERS = 6000
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PRELOADED = ["tests.helpers.preloaded"]
"""What the template has imported. A process has one template, for all that fork from it."""


@dataclass(frozen=True)
class Failure:
    """What one rank had to say."""

    rank: int
    kind: str
    """The exception's class name, ``"exit"`` if the process ended, ``"timeout"`` if it was still running."""
    text: str
    """Traceback, or the tail of the process's output, or its stack."""


class RankError(RuntimeError):
    """At least one rank failed; ``failures`` holds them, the one that failed first in front."""

    def __init__(self, headline: str, failures: list[Failure]) -> None:
        self.failures = failures
        body = "\n".join(f"----- rank {f.rank} ({f.kind}) -----\n{f.text.rstrip()}" for f in failures)
        super().__init__(f"{headline}\n{body}")


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """``[fn(*args) of rank 0, of rank 1, ...]`` from fresh processes that are gone afterwards.

    Raises:
        RankError: if a rank raised, died, or did not finish in time.
    """
    with RankPool() as pool:
        return pool.run(fn, *args, world_size=world_size, timeout_seconds=timeout_seconds)


class RankPool:
    """Workers that stay alive between jobs; those that took part in a failed job are replaced."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._ports: set[int] = set()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every worker."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int,
        timeout_seconds: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """One job on ranks ``0 .. world_size - 1``; ``env`` adds variables to each rank's environment.

        Raises:
            RankError: if a rank raised, died, or did not finish in time.
        """
        if fn.__module__ == "__main__":
            raise ValueError(f"{fn.__qualname__} lives in __main__: the ranks can only import it from a module.")
        workers = self._ready_workers(world_size)
        store = _agent_store(self._ports)
        job = pickle.dumps((fn, args))
        try:
            for rank, worker in enumerate(workers):
                worker.start({**_torchrun_env(rank, world_size, store.port), **(env or {})}, job)
            results = _collect(workers, timeout_seconds, getattr(fn, "__qualname__", str(fn)))
        except BaseException as error:  # KeyboardInterrupt and pytest-timeout included: no rank is left in a collective
            if not isinstance(error, RankError):  # a job's own limit shows where each rank is; so does the test's
                for rank, worker in enumerate(workers):
                    print(f"----- rank {rank} of {world_size} -----\n{worker.stacks()}", file=sys.stderr)
            for worker in workers:
                worker.kill()
            raise
        for worker in workers:  # only now that all have finished, or a peer would find connections closed
            worker.reset()
        return results

    def _ready_workers(self, world_size: int) -> list[_Worker]:
        self._workers = [worker if worker.alive else _Worker() for worker in self._workers]
        self._workers += [_Worker() for _ in range(world_size - len(self._workers))]
        workers = self._workers[:world_size]
        for worker in workers:
            worker.wait_until_ready()
        return workers


def _torchrun_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _agent_store(used: set[int]) -> Any:
    """The key-value store that torchrun's agent keeps for its ranks, on a port of the system's choice; none of those
    ``used`` by earlier jobs, as a process that has failed refuses another run at its port.

    Were it rank 0's, the others would often come too early and retry a good half second later.
    """
    from torch.distributed import TCPStore

    held = []  # so that the system chooses another
    while (store := TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)).port in used:
        held.append(store)
    used.add(store.port)
    return store


# ---------------------------------------------------------------------------------------------------------------------
# The parent's side of a worker
# ---------------------------------------------------------------------------------------------------------------------


class _Worker:
    def __init__(self) -> None:
        # One connection each way. The parent's copies of the child's ends are closed, so that either side sees the
        # other's end as end-of-file.
        jobs_read, self._jobs = Pipe(duplex=False)
        self.results, results_write = Pipe(duplex=False)
        self._log = tempfile.NamedTemporaryFile("w+b")  # noqa: SIM115
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        env = {**_outer_env(), **THREADS}
        # A daemon, so that this process's exit ends it in any case
        self.process = context.Process(target=_serve, args=(jobs_read, results_write, self._log.name, env), daemon=True)
        self.process.start()
        jobs_read.close()
        results_write.close()
        self._ready = False
        self._log_start = 0

    @property
    def alive(self) -> bool:
        return not self._log.closed and self.process.is_alive()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        if self.results.poll(STARTUP_SECONDS):
            with contextlib.suppress(EOFError):
                assert self.results.recv_bytes() == b"ready"
                self._ready = True
                return
        log = self.output()
        self.kill()
        raise RuntimeError(f"a worker was not ready within {STARTUP_SECONDS} s:\n{log}")

    def start(self, env: dict[str, str], job: bytes) -> None:
        self._log_start = os.fstat(self._log.fileno()).st_size
        self._jobs.send((env, job))

    def reset(self) -> None:
        self._ready = False
        self._jobs.send(None)

    def output(self) -> str:
        """What the worker printed since the job began (its tail)."""
        text = os.pread(self._log.fileno(), 1 << 22, self._log_start).decode(errors="replace")
        return text[-LOG_TAIL_CHARACTERS:]

    def stacks(self) -> str:
        """The stack of every thread, also of one that hangs in C++ code."""
        before = os.fstat(self._log.fileno()).st_size
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(GRACE_SECONDS)
        return os.pread(self._log.fileno(), 1 << 20, before).decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # should it have no group of its own yet
        self.process.join()
        self._jobs.close()
        self.results.close()
        self._log.close()


def _outer_env() -> dict[str, str]:
    """The parent's environment without what a previous fit, a launcher or a batch system left in it."""
    prefixes = ("SLURM_", "TORCHELASTIC_", "PL_", "OMPI_", "PMI_")
    names = {*_torchrun_env(0, 1, 0), "NODE_RANK"}
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}


def _collect(workers: list[_Worker], timeout_seconds: float, name: str) -> list[Any]:
    """Every rank's result, or :class:`RankError` with whatever can be said about the failure."""
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    pending = {worker.results: rank for rank, worker in enumerate(workers)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[index]
            try:
                kind, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                workers[rank].process.join()
                code, output = workers[rank].process.exitcode, workers[rank].output()
                failures.append(Failure(rank, "exit", f"exit code {code}; its output:\n{output}"))
                continue
            if kind is None:
                results[rank] = value
            else:
                failures.append(Failure(rank, kind, value))
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        first = failures[0]
        raise RankError(f"rank {first.rank} of {len(workers)} failed in {name} ({first.kind}):", failures)
    if pending:
        stuck = [Failure(rank, "timeout", workers[rank].stacks()) for rank in sorted(pending.values())]
        ranks = ", ".join(str(f.rank) for f in stuck)
        raise RankError(f"{name} took longer than {timeout_seconds} s on {len(workers)} ranks; stuck: {ranks}", stuck)
    return [results[rank] for rank in range(len(workers))]


# ---------------------------------------------------------------------------------------------------------------------
# Inside a worker
# ---------------------------------------------------------------------------------------------------------------------


def _serve(jobs: Connection, results: Connection, log: str, env: dict[str, str]) -> None:
    """Runs jobs until the parent closes the connection; never returns."""
    import gc

    os.setsid()  # its own process group, so that killing it takes its children along
    multiprocessing.current_process().daemon = False  # a daemon may have none
    multiprocessing.set_start_method(None, force=True)  # of data loaders' workers: Python's default again
    with open(log, "ab") as file:
        for output, fd in ((sys.stdout, 1), (sys.stderr, 2)):
            os.dup2(file.fileno(), fd)
            output.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    _show_crashes()
    results.send_bytes(b"ready")
    imported = len(sys.modules)
    for job in _jobs(jobs):
        if job is None:
            _reset(env)
            while gc.collect():
                pass  # a round frees what only tensors and nodes of autograd held, which hide it from the collector
            if len(sys.modules) > imported:
                gc.freeze()  # nor through these imports; after each job it would keep for ever what is let go later
                imported = len(sys.modules)
            results.send_bytes(b"ready")
            continue
        of_job, call = job
        _reset({**env, **of_job})
        try:
            fn, args = pickle.loads(call)
            answer = pickle.dumps((None, fn(*args)))
        except BaseException as error:
            answer = pickle.dumps((type(error).__name__, traceback.format_exc()))
        sys.stdout.flush()
        results.send_bytes(answer)


def _jobs(connection: Connection) -> Iterator[Any]:
    """Jobs as they come. A thread reads them, so that a worker whose parent is gone ends even in mid-job."""
    inbox: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        while True:
            try:
                inbox.put(connection.recv())
            except (EOFError, OSError):
                os._exit(1)

    threading.Thread(target=read, daemon=True, name="jobs").start()
    while True:
        yield inbox.get()


def _show_crashes() -> None:
    """Stacks on a crash and on SIGUSR1. Lightning puts back the handlers that Python knows of after each run, which
    takes these away."""
    import faulthandler

    faulthandler.disable()
    faulthandler.enable()
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def _reset(env: dict[str, str]) -> None:
    """The state a fresh process would be in, as far as a job can have changed it."""
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_zero.launch import launcher, rendezvous

    launcher.destroy_process_group()
    launcher.refusal = None
    rendezvous.forget()  # the next job's agent may have the port of one that only some of its ranks were in
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _show_crashes()
    rank_zero_only.rank = int(env.get("RANK", 0))
    random.seed(0)
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(0)
    torch.nn.functional.linear = torch._C._nn.linear  # a raw deepspeed.initialize replaces it for good
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


def job_store() -> Any:
    """Where the ranks of a job tell each other how far they are. Only ``add`` waits until the others can see it."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


def outcome(fn: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """``("ok", repr(result))`` or the exception's class name and text: for jobs that are expected to raise.

    A raising rank costs the pool its workers; a rank that returns its exception does not.
    """
    try:
        return "ok", repr(fn(*args))
    except Exception as error:
        return type(error).__name__, str(error)
