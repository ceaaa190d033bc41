"""Starts and ends the ranks of a run.

[Ways of starting]
- *outside*: torchrun, srun or mpirun has started every rank. Lightning compares their number with ``devices`` and
  ``num_nodes``.
- *popen*: all ranks of a machine but its first execute the program again. Under Hydra they do not parse the command
  line, which may contain a sweep. They get the overrides of the job that rank 0 runs. A
  :mod:`~lightning_zero.launch.supervisor` process watches them and rank 0.
- *spawn*, *fork*: all ranks are children of this process, which gets weights and metrics back. This is for programs
  that cannot be executed again: a notebook, pytest, ``python -c``.

:mod:`~lightning_zero.launch.session` holds the ranks of *popen*. :mod:`~lightning_zero.launch.failure` handles runs
that raise.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout

from lightning_zero.comm.agree import forget_shared
from lightning_zero.host import allow_open_files, files_of_a_run, interface_to
from lightning_zero.launch import failure, rendezvous, restart, supervisor
from lightning_zero.launch.session import (
    current,
    end_session,
    hydra_output_dir,
    start_session,
)
from lightning_zero.launch.step_sync import sync_steps
from lightning_zero.private.check import check
from lightning_zero.private.lightning import (
    LIGHTNING,
    GlobalStateSnapshot,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    TunerExit,
    backend_of,
    set_launcher,
    set_num_threads_if_needed,
    timeout_of,
)
from lightning_zero.private.torch import abort_process_groups, forget_meshes

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""The number of ranks, as set by mpirun: the first by Open MPI, the second by MPICH and Intel MPI."""


def choose_start_method(method: str, num_processes: int) -> str:
    """Resolves ``"auto"`` to ``"popen"``, ``"spawn"`` or ``"fork"``; other methods are returned unchanged."""
    if method != "auto":
        return method
    if hasattr(sys, "ps1"):  # a notebook: a spawned process cannot import its classes
        return "fork"
    if num_processes == 1:  # this process is the only rank
        return "popen"
    program = sys.modules["__main__"]
    if "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "spawn"  # executing pytest again would run every test again
    if not getattr(program, "__file__", None):  # python -c, or a program from a pipe
        return "fork"
    return "popen"


def check_started(environment: Any, devices: int, num_nodes: int) -> None:
    """Checks the number of ranks that another launcher has started.

    Raises:
        ValueError: torchrun's or srun's settings are not ``devices`` and ``num_nodes``, srun was forgotten, or each
            rank of mpirun would start all ranks of a run.
    """
    if environment.creates_processes_externally:
        tasks = int(os.environ.get("SLURM_NTASKS", "1")) if isinstance(environment, SLURMEnvironment) else 1
        if tasks > 1 and "SLURM_STEP_ID" not in os.environ:
            raise ValueError(
                f"SLURM_NTASKS={tasks}, but the batch script itself has started a single process: put srun in front of"
                " the script's python line."
            )
        environment.validate_settings(num_devices=devices, num_nodes=num_nodes)
    elif (by_mpirun := max(int(os.environ.get(name, "1")) for name in _MPI_SIZES)) > 1:
        raise ValueError(
            f"mpirun started {by_mpirun} ranks, which Lightning cannot see without mpi4py: pip install mpi4py, or start"
            " the ranks with torchrun."
        )


# -- popen -----------------------------------------------------------------------------------------------------------


refusal: tuple[str | None, str] | None = None
"""The Hydra job (``None`` outside of Hydra) of a run that failed, and its error: no other run may follow it."""


class PopenLauncher(SubprocessScriptLauncher):
    """Starts the other ranks by executing the program again, unless another launcher has started them.

    Args:
        strategy: Has ``cluster_environment``, ``num_processes`` and ``num_nodes``, which are read when a run starts.
        log_folder: Folder for the output of ranks, one file each. ``None`` is ``ranks/`` in a Hydra job's folder, and
            the terminal outside of Hydra.
    """

    def __init__(self, strategy: Any, log_folder: str | None = None) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy
        self._log_folder = log_folder
        _end_session_of_an_earlier_job()

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        _end_session_of_an_earlier_job()
        _refuse_after_failure()
        check_started(self.cluster_environment, self.num_processes, self.num_nodes)
        args, kwargs = _continued(function, args, kwargs, trainer)
        try:
            self._find_ranks()
            return function(*args, **kwargs)
        except BaseException as error:
            if self.num_processes * self.num_nodes > 1 and not isinstance(error, TunerExit):
                self._end_after(error, trainer)
            raise

    @property
    def _starts_ranks(self) -> bool:
        return current() is not None or (
            not self.cluster_environment.creates_processes_externally and self.num_processes > 1
        )

    def _find_ranks(self) -> None:
        """Starts the other ranks of this machine unless they exist."""
        if self._starts_ranks and current() is None:
            _drop_process_group()
            start_session(self.cluster_environment, self.num_processes, self.num_nodes, self._log_folder)
        elif supervisor.ERROR_FILE in os.environ and dist.is_initialized() and dist.get_world_size() == 1:
            _drop_process_group()
        failure.note_scratch()
        set_num_threads_if_needed(num_processes=self.num_processes)
        atexit.unregister(destroy_process_group)
        atexit.register(destroy_process_group)

    def _end_after(self, error: BaseException, trainer: Any) -> None:
        """Handles ``error``, which a run of several ranks has raised; see :mod:`~lightning_zero.launch.failure`."""
        session = current()
        if failure.is_preempted(error) or (session is None and self._starts_ranks):
            return  # the ranks end by themselves, or have not started
        failure.write(error)  # first of all: its time says which rank failed first
        self._leave_run(error, trainer)
        if session is not None:
            session.log(failure.full(error))
            if (cause := end_session(failed=True)) and hasattr(error, "add_note"):
                error.add_note(f"lightning_zero: {cause} before this.")
        elif os.environ.get(supervisor.RANK_LOG) == "":
            sys.excepthook = partial(_show_all_but, error, sys.excepthook)  # the supervisor shows it on the terminal

    def _leave_run(self, error: BaseException, trainer: Any) -> None:
        """Makes this rank wait for no other, because the others may be anywhere."""
        global refusal
        failure.skip_saves(trainer, "after an error of one rank the others cannot take part in a save")
        if current() is not None or (dist.is_initialized() and dist.get_world_size() == self._strategy.world_size):
            refusal = hydra_output_dir(), failure.summary(error)
        if self._strategy.queues_collectives:
            # Before Lightning's teardown, which frees device memory. That waits for all queued work, even for a
            # collective that other ranks never join.
            _drop_process_group()


def _show_all_but(shown: BaseException, otherwise: Callable[..., Any], kind: Any, error: Any, tb: Any) -> None:
    """Replaces ``sys.excepthook``."""
    if error is not shown:
        otherwise(kind, error, tb)


def _continued(function: Callable[..., Any], args: Any, kwargs: Any, trainer: Any) -> tuple[Any, Any]:
    """Adds the newest checkpoint to the arguments of a fit that its batch system has started again."""
    if trainer.state.fn != TrainerFn.FITTING:
        return args, kwargs
    bound = inspect.signature(function).bind(*args, **kwargs)
    if "ckpt_path" in inspect.signature(function).parameters and (path := restart.find()):
        bound.arguments["ckpt_path"] = path
    return bound.args, bound.kwargs


def _end_session_of_an_earlier_job() -> None:
    """Ends the ranks of the preceding job of a sweep in this process: each job has its own ranks."""
    session = current()
    if session is not None and session.job != hydra_output_dir() and (cause := end_session()):
        raise RuntimeError(f"an earlier job of this process has failed: {cause}.")


def _refuse_after_failure() -> None:
    """Refuses a run after one of several ranks that failed.

    The ranks may be at different places. New ranks would execute this script from its top: they would train its first
    run while rank 0 trains a later one.

    Raises:
        RuntimeError: With the cause of the earlier failure.
    """
    if refusal is not None and refusal[0] == hydra_output_dir():
        raise RuntimeError(
            f"this script cannot start another run after one of several ranks that failed ({refusal[1]}): the ranks may"
            " have diverged. Repair the cause and start the script again, or use ZeroStrategy(start_method='spawn'),"
            " with which each run starts its own ranks."
        )


def destroy_process_group() -> None:
    """Destroys the process group, which releases its sockets, threads and the store's port at once.

    This package's own caches refer to the group and would keep it alive, so they are cleared as well.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_shared()
    forget_meshes()


def _drop_process_group() -> None:
    """Ends the process group that a failed run, or code before the run, has left. A process can have only one."""
    if dist.is_initialized() and dist.is_nccl_available() and "nccl" in dist.get_backend_config():
        abort_process_groups()  # destroying the group would wait for queued collectives
    destroy_process_group()


# -- spawn and fork --------------------------------------------------------------------------------------------------


class ProcessesLauncher(MultiProcessingLauncher):
    """Starts all ranks of a machine as children of this process, which gets their results back.

    Unlike Lightning's launcher, it leaves nothing in the environment and in the temporary folder, and ends the other
    ranks within seconds when one fails.
    """

    _skipped = contextlib.ExitStack()
    """Undoes the replacement of saves after a run that failed."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        strategy, environment = self.strategy, self.strategy.cluster_environment
        check_started(environment, strategy.num_processes, strategy.num_nodes)
        if environment.creates_processes_externally:
            return function(*args, **kwargs)
        self._skipped.close()
        self.refuse_second_fit(trainer)
        before = dict(os.environ)
        self.folder = tempfile.mkdtemp(prefix="lightning_zero-")
        try:
            os.environ["MASTER_PORT"] = str(environment.main_port)
            self._run_ranks(trainer, function, args, kwargs)
            found = torch.load(os.path.join(self.folder, "results"), map_location="cpu", weights_only=False)
            results = self.recover(found, trainer)
            if trainer.lightning_module is not None:  # the run attached the Trainer to the ranks' copies only
                trainer.lightning_module.trainer = trainer
            return results
        except BaseException:
            self._skipped = failure.skip_saves(trainer, "the processes that held the state of the training have ended")
            raise
        finally:
            self.kill(signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)
            os.environ.clear()
            os.environ.update(before)

    def _run_ranks(self, *call: Any) -> None:
        if self.start_method == "fork":
            _check_fork()
        snapshot = GlobalStateSnapshot.capture() if self.start_method == "spawn" else None
        try:
            context: Any = mp.start_processes(
                self._rank, (*call, snapshot), self.strategy.num_processes, start_method=self.start_method, join=False
            )
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"start_method={self.start_method!r} cannot send the run to other processes ({error}). Under pytest"
                " ranks are spawned: move the test's classes (module, data, callbacks) out of the function to the top"
                " of the file, or use ZeroStrategy(start_method='fork'), which pickles nothing."
            ) from error
        self.procs = context.processes
        try:
            while not context.join(grace_period=supervisor.SECONDS[supervisor.State.ENDING]):
                pass
        finally:
            for path in context.error_files:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _rank(self, index: int, *call: Any) -> None:
        """Runs one rank. Rank 0 stores its results in a file, because a queue would hold them in shared memory."""
        if self.start_method == "fork":
            gc.freeze()  # do not collect the parent's garbage: a process group in it lacks its threads here
        try:
            found = self.run_rank(index, *call)
            if index == 0:
                torch.save(found, os.path.join(self.folder, "results"))
        finally:
            destroy_process_group()  # a group that lives until the interpreter exits may end it in std::terminate


def _check_fork() -> None:
    """Checks that this process can be forked.

    A forked process lacks the threads of CUDA and of a process group, and neither works without them.

    Raises:
        RuntimeError: This process has used CUDA, or is in a process group.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "start_method='fork': this process has used CUDA, so forked processes cannot. Restart the notebook and use"
            " no CUDA tensor before fit, or use start_method='spawn'."
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"start_method='fork': this process is in a process group of {dist.get_world_size()} ranks already, so"
            " forked ranks cannot join another. Your code has opened it, or an earlier Trainer (Lightning's 'ddp' with"
            " devices=1) has left it. Call torch.distributed.destroy_process_group() before fit, or use"
            " start_method='spawn'."
        )
    forget_meshes()  # they hold the groups of earlier runs in this process


SAME_DEVICES = (
    "Give every Trainer of a script the same devices=. A Trainer that works alone (a test after a fit) can use"
    " strategy='auto'."
)


def _check_group(world_size: int) -> None:
    """Checks that the existing process group has the size of this run.

    Raises:
        RuntimeError: It has another size.
    """
    if (found := dist.get_world_size()) != world_size:
        raise RuntimeError(
            f"the run has {world_size} ranks, but this process is in a process group of {found} already. {SAME_DEVICES}"
            " If your code has opened the group, first call torch.distributed.destroy_process_group(). If an earlier"
            " Trainer (Lightning's 'ddp' with devices=1) has left it, also remove LOCAL_RANK from os.environ."
        )


class Launched(DDPStrategy):
    """DDP whose ranks this package starts, supervises and ends."""

    start_method = "auto"
    rank_logs: str | None = None

    @property
    def queues_collectives(self) -> bool:
        """Whether collectives wait for other ranks on the device instead of in this process."""
        return bool(self.root_device.type != "cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The actual number of ranks. A user's cluster environment may count them differently from the Trainer."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        """Opens the process group as DDP does, but waits longer for ranks that are still importing, and names them."""
        self.set_world_ranks()
        if dist.is_initialized():
            _check_group(self.world_size)
        elif self.world_size > 1:
            environment = self.cluster_environment
            assert environment is not None
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
            # Otherwise each gloo group connects all pairs of ranks, and a process runs out of open files.
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            if self.num_nodes > 1 and (name := interface_to(environment.main_address, environment.main_port)):
                # gloo would take the interface of this host's name, which other hosts often cannot reach
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            # Rank 0's store and the exchange between CPU processes still need one file per rank (docs/scaling.md).
            allow_open_files(files_of_a_run(self.world_size))
            rank, size = self.global_rank, self.world_size
            limit: timedelta = timeout_of(self) or default_pg_timeout  # type: ignore[arg-type]
            backend = backend_of(self)
            rank_zero_info(f"Initializing distributed: {size} ranks, backend {backend}")
            expected = f"devices={self.num_processes}, num_nodes={self.num_nodes}"
            store = rendezvous.meet(environment.main_address, environment.main_port, rank, size, expected)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=limit,
                device_id=self.root_device if self.root_device.type != "cpu" else None,
            )
        super().setup_distributed()

    def _configure_launcher(self) -> None:
        check(LIGHTNING)
        method = choose_start_method(self.start_method, self.num_processes)
        assert self.cluster_environment is not None
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            set_launcher(self, PopenLauncher(self, self.rank_logs))
        else:
            set_launcher(self, ProcessesLauncher(self, method))  # type: ignore[arg-type]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.note_checkpoint(checkpoint, filepath)

    def note_checkpoint(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Adds the new checkpoint to the restart note, in which the run that continues this one finds it."""
        if self.is_global_zero:
            try:
                restart.note(checkpoint, filepath)
            except OSError as error:  # not fatal: the checkpoint itself is stored
                rank_zero_warn(f"A restarted run will not find {filepath} automatically: {error}")


class LaunchedDDP(Launched):
    """Lightning's DDP with this package's launcher, supervisor and restarts."""

    def setup(self, trainer: Any) -> None:
        sync_steps(trainer, self)
        super().setup(trainer)
