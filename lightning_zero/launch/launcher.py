"""Start and end of the ranks of a run.

[Ways of starting]
- *outside*: torchrun, srun, mpirun. Every rank exists already; what they say about themselves must agree with
  ``devices`` and ``num_nodes``.
- *popen*: the ranks 1.. of a machine execute the program again. Under Hydra they do not parse the command line, of
  which a sweep is part, but take the very config of the job that rank 0 runs. A
  :mod:`~lightning_zero.launch.supervisor` process watches them and rank 0.
- *spawn*, *fork*: all ranks are children of this process, which gets weights, metrics and predictions back. For
  programs that cannot be executed again: a notebook, pytest, ``python -c``.

The ranks of *popen* are a :mod:`~lightning_zero.launch.session`; runs that fail are the subject of
:mod:`~lightning_zero.launch.failure`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import get_temp_dir
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout

from lightning_zero.comm.agree import forget_shared
from lightning_zero.host import allow_open_files, files_of_a_run, require_open_files
from lightning_zero.launch import failure, rendezvous, restart, supervisor, tracebacks
from lightning_zero.launch.environment import adapt_environment, check_world, without_requeueing
from lightning_zero.launch.interrupt import leave_at_once, set_starting
from lightning_zero.launch.session import (
    ERROR_FILE,
    GRACE_SECONDS,
    current,
    end_session,
    hydra_output_dir,
    ready_file,
    start_session,
)
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
from lightning_zero.private.torch import abort_process_groups, forget_meshes

program_arguments: list[str] = []
"""Words of the command line before Hydra's own arguments, if this program has any."""


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


_refusals: dict[tuple[str | None, str], str] = {}
"""Hydra job (``None`` outside of Hydra), port of ranks that were started from outside -> why no other run is possible
with these ranks."""
_reporter: failure.Reporter | None = None
_runs_inside = 0
"""Runs under way in this process, one inside the other."""


class PopenLauncher(SubprocessScriptLauncher):
    """Starts the other ranks by executing the program again, unless they were started from outside.

    Args:
        strategy: Whose ``cluster_environment``, ``num_processes`` and ``num_nodes`` are meant, read when a run starts.
        log_folder: Where each rank's output goes, one file per rank; ``None``: ``ranks/`` in a Hydra job's folder,
            the terminal outside of Hydra.
    """

    def __init__(self, strategy: Any, log_folder: str | None = None) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy
        self._log_folder = log_folder
        _end_session_of_an_earlier_job()

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        global _reporter, _runs_inside
        _end_session_of_an_earlier_job()
        _refuse_after_failure()
        check_world(self.cluster_environment, self.num_processes, self.num_nodes)
        args, kwargs = _continued(function, args, kwargs, trainer)
        if trainer is not None:
            failure.save_again(trainer)
        if _reporter is None and (ERROR_FILE in os.environ or self._starts_ranks):
            _reporter = failure.Reporter()
        _runs_inside += 1
        try:
            self._find_ranks(function, args, kwargs)
            return function(*args, **kwargs)
        except BaseException as error:
            self._end_after(error, trainer)
            raise
        finally:
            set_starting(False)
            _runs_inside -= 1
            if (session := current()) is not None and not _runs_inside:
                session.stop_copying()

    @property
    def _starts_ranks(self) -> bool:
        return current() is not None or (
            not self.cluster_environment.creates_processes_externally and self.num_processes > 1
        )

    def _find_ranks(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Returns when the other ranks of this machine, if they are ours to start, have come to the same run."""
        global _run
        _run += self.num_processes > 1
        if (session := current()) is not None:
            if _runs_inside == 1:  # not a validation inside a fit, whose end is not the end of the fit's output
                session.copy_output()
            set_starting(True)
            if session.how is not None:  # all have raised in the run before: have all caught it?
                session.wait_until_ready(_run)
                session.how = None
        elif self._starts_ranks:
            _run = 1
            _drop_process_group()
            check_checkpoint(function, args, kwargs)
            session = start_session(
                *(self.cluster_environment, self.num_processes, self.num_nodes, self._log_folder, program_arguments)
            )
            session.wait_until_ready(_run)
        elif errors := os.environ.get(ERROR_FILE):
            if _run == 1:
                _drop_process_group()
            ready_file(errors, _run).write_text(get_temp_dir(), encoding="utf-8")
        set_num_threads_if_needed(num_processes=self.num_processes)
        if dist.is_available():
            atexit.unregister(destroy_process_group)
            atexit.register(destroy_process_group)

    def _end_after(self, error: BaseException, trainer: Any) -> None:
        """``error`` has come out of a run; see :mod:`~lightning_zero.launch.failure`."""
        if isinstance(error, SystemExit):
            if error.code == supervisor.PREEMPTED_EXIT_CODE:
                end_session("preempted")
            else:
                _end_other_ranks(error)
            return
        if self._starts_ranks and current() is None:  # no rank was started, so there is nothing to end or agree on
            _note(error, "the run did not begin", is_effect=isinstance(error, rendezvous.RankLost))
            return
        path = os.environ.get(ERROR_FILE)
        if path and not isinstance(error, KeyboardInterrupt):
            failure.write(path, error)
        failed_at = time.time()
        session = current()
        is_over = session.lacks_a_rank if session is not None else lambda: False
        if session is not None:
            session.log(tracebacks.whole(error))
        why, tells = failure.all_raised(error, self._strategy, trainer, is_over)
        if path and (why is None or not isinstance(error, KeyboardInterrupt)):
            failure.write(path, error, alike=why is None, alone=why is not None, at=failed_at)
        if why is None:
            if session is not None:
                session.how = "failed"
            _note(error, "all ranks failed alike, rank 0 with" if self.num_processes > 1 else "the run failed with")
            return
        _refusals[_these_ranks()] = f"{tracebacks.summary(error)}, {why}"
        if trainer is not None:
            failure.skip_saves(trainer, why, tells)
        _end_other_ranks(error, failed_at)

    def kill(self, signum: int) -> None:
        """The supervisor ends the other ranks; signals that this rank receives are not theirs."""


_run = 0
"""Number of the run in this process since its ranks were started, the same on all ranks."""


def _continued(function: Callable[..., Any], args: Any, kwargs: Any, trainer: Any) -> tuple[Any, Any]:
    """A fit that was interrupted and started again by its batch system goes on from its newest checkpoint."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return args, kwargs
    bound = inspect.signature(function).bind(*args, **kwargs)
    if "ckpt_path" in inspect.signature(function).parameters and (path := restart.find()):
        bound.arguments["ckpt_path"] = path
    return bound.args, bound.kwargs


def check_checkpoint(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Before any rank is started: the checkpoint that a run is to begin from is there.

    Raises:
        FileNotFoundError: Naming it.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    path = bound.arguments.get("ckpt_path")
    if path is None or str(path) in _LIGHTNINGS_OWN or str(path).startswith("registry"):
        return
    fs, target = fsspec.core.url_to_fs(os.fspath(path))
    if not fs.exists(target):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")


_LIGHTNINGS_OWN = ("best", "last", "hpc")
"""Words for ``ckpt_path`` that are no paths."""


def _end_session_of_an_earlier_job() -> None:
    """In a sweep that runs in this process, each job has ranks of its own."""
    session = current()
    if session is not None and session.job != hydra_output_dir():
        answer = end_session(session.how or "clean")
        if answer.get("failed") and session.how is None:
            raise RuntimeError(f"rank {answer['failed']['rank']} of an earlier job {answer['failed']['what']}.")


def _these_ranks() -> tuple[str | None, str]:
    from_outside = current() is None and "LOCAL_RANK" in os.environ
    return hydra_output_dir(), os.environ.get("MASTER_PORT", "") if from_outside else ""


def _refuse_after_failure() -> None:
    """Ranks that ended are not started again: they would execute this script from its top, and train what it trained
    first beside what rank 0 trains now."""
    cause = _refusals.get(_these_ranks())
    if cause is not None:
        error = RuntimeError(
            f"another run in this script is not possible after one that failed on some ranks only ({cause}): the ranks"
            " are no longer at the same place. Repair the cause and start the script again."
        )
        _note(error, "this run did not begin")
        raise error


def _end_other_ranks(error: BaseException, failed_at: float | None = None) -> None:
    session = current()
    if session is None:
        _note(error, "this rank failed with")
        return
    first = session.first_rank
    how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    answer = end_session(how, failed_at=None if how == "interrupted" else failed_at)
    if how == "interrupted":
        leave_at_once()
    found = answer.get("failed") or session.failed_rank
    if not found:
        _note(error, f"rank {first} failed with")
        return
    _refusals[_these_ranks()] = f"rank {found['rank']} {found['what']}"
    _note(error, f"rank {first} has ended because of that", is_effect=True)
    if hasattr(error, "add_note"):
        error.add_note(f"lightning_zero: rank {found['rank']} {found['what']} before this.")


def _note(error: BaseException, headline: str, is_effect: bool = False) -> None:
    if _reporter is not None:
        _reporter.note(error, headline, is_effect)


def destroy_process_group() -> None:
    """Ends a group of any backend: sockets, threads and the store's port are given back now. What this package keeps
    for as long as there is a group would keep it alive."""
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_shared()
    forget_meshes()


def _drop_process_group() -> None:
    """Ends the group that a failed job of a sweep, or a run on one device, has left: a process has one at a time."""
    if dist.is_initialized() and dist.is_nccl_available() and "nccl" in dist.get_backend_config():
        abort_process_groups()  # to destroy it would wait for them
    destroy_process_group()


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
        check_checkpoint(function, args, kwargs)
        if trainer is not None:
            failure.save_again(trainer)
        before = dict(os.environ)
        self._folder = self._collector.folder = tempfile.mkdtemp(prefix="lightning_zero-")
        try:
            os.environ["MASTER_PORT"] = str(environment.main_port)
            return self._launch(function, args, kwargs, trainer)
        except BaseException:
            if trainer is not None:
                failure.skip_saves(trainer, "the state of the training was theirs and has gone with them")
            raise
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
        if self._start_method == "fork":
            _leave_no_group_to_forks()
            self._strategy.before_fork()
        snapshot = GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        call, what = self._rank, (trainer, function, args, kwargs, snapshot)
        try:
            context = self._start(call, what)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if self._start_method == "fork":
                raise
            context = self._start(*_by_value(call, what, error))
        self.procs = context.processes
        try:
            while not context.join(grace_period=GRACE_SECONDS["failed"]):
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
        if trainer.lightning_module is not None:  # attached in its copies only, where the run was
            trainer.lightning_module.trainer = trainer
        if trainer.state.fn == TrainerFn.PREDICTING:
            return whole_predictions([rank["results"] for rank in ranks], ranks[0]["loaders"])
        return ranks[0]["results"]

    def _start(self, call: Any, args: tuple[Any, ...]) -> Any:
        return mp.start_processes(
            call, args=args, nprocs=self._strategy.num_processes, start_method=self._start_method, join=False
        )

    def _rank(
        self, process_idx: int, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any, snapshot: Any
    ) -> None:
        """Runs one rank; its results go into files, as a queue would hold them in shared memory."""
        if self._start_method == "fork":
            gc.freeze()  # a group in garbage of the parent's is not collected here, where its threads are not
        box: Any = _Box()
        results: list[Any] = []

        def call(*a: Any, **k: Any) -> Any:
            results.append(function(*a, **k))
            return results[0]

        try:
            self._collector.run_rank(process_idx, trainer, call, args, kwargs, box, snapshot)
        except BaseException:
            destroy_process_group()  # one that is left to the end of the interpreter may end it in std::terminate
            raise
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


def _leave_no_group_to_forks() -> None:
    """A process group has threads, which a forked process has not: one that it inherits can neither work nor end there.

    Raises:
        RuntimeError: This process is in one.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"start_method='fork': this process is in a process group of {dist.get_world_size()} ranks already, which"
            " its own code has opened or an earlier Trainer left (Lightning's 'ddp' with devices=1 does), and forked"
            " ranks cannot be in another. End it before fit, with torch.distributed.destroy_process_group(), or use"
            " start_method='spawn'."
        )
    forget_meshes()  # which hold the groups of earlier runs in this process


def _by_value(call: Any, args: tuple[Any, ...], error: BaseException) -> tuple[Any, tuple[Any, ...]]:
    """``call`` and ``args`` for a spawned process, which imports what it is given by name: not possible for a class
    inside a function (as in a test), which cloudpickle sends itself.

    Raises:
        TypeError: Naming what cannot be sent, and what to do.
    """
    try:
        import cloudpickle  # comes with other packages, and only such classes need it

        return _run_pickled, (cloudpickle.dumps((call, args)),)
    except Exception as second:
        reason = error if isinstance(second, ModuleNotFoundError) else second
        raise TypeError(
            f"start_method='spawn' cannot send the run to other processes ({reason}). Under pytest ranks are spawned:"
            " move the classes that the test uses (module, data, callbacks) out of the function to the top of the file,"
            " or pip install cloudpickle, or use ZeroStrategy(start_method='fork'), which sends nothing."
        ) from error


def _run_pickled(process_idx: int, pickled: bytes) -> None:
    call, args = pickle.loads(pickled)
    call(process_idx, *args)


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


SAME_DEVICES = (
    "Give every Trainer of a script the same devices=, or, for one that works alone (a test after a fit),"
    " strategy='auto'."
)


def _check_group(world_size: int) -> None:
    """The process group that is there already is this run's."""
    found = dist.get_world_size()
    if found > world_size:
        raise RuntimeError(f"world size {world_size}, but this process is one of {found} ranks already. {SAME_DEVICES}")
    if found < world_size:
        raise RuntimeError(
            f"the run has {world_size} ranks, but this process is in a process group of {found} already, which an"
            " earlier Trainer (Lightning's 'ddp' with devices=1) or its own code has left: begin the run in a process"
            " of its own, or before it call torch.distributed.destroy_process_group() and take LOCAL_RANK out of"
            " os.environ, which makes this process one of several."
        )


class Launched:
    """Mixin for ``DDPStrategy`` and what derives from it: how its ranks are started, watched and ended."""

    start_method = "auto"
    rank_logs: str | None = None
    cluster_environment_: Any = None
    _not_requeueing: contextlib.ExitStack | None = None

    @property
    def cluster_environment(self) -> Any:
        return self.cluster_environment_

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        self.cluster_environment_ = adapt_environment(environment)

    def before_fork(self) -> None:
        """Called by the launcher: what is imported here, the ranks share."""

    def setup_environment(self) -> None:
        self.requeue_again()  # a run that ended without its teardown
        self._not_requeueing = contextlib.ExitStack()
        self._not_requeueing.enter_context(without_requeueing(self.cluster_environment))
        super().setup_environment()  # type: ignore[misc]

    def teardown(self) -> None:
        self.requeue_again()
        super().teardown()  # type: ignore[misc]

    def requeue_again(self) -> None:
        """A run is over: Lightning's own requeueing is what the user has set."""
        stack, self._not_requeueing = self._not_requeueing, None
        if stack is not None:
            stack.close()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks that are there, which an environment of the user's may count otherwise than the Trainer."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # type: ignore[attr-defined]

    def setup_distributed(self) -> None:
        """As DDP's, but ranks that are still importing are waited for, by name and for as long as a start takes."""
        self.set_world_ranks()  # type: ignore[attr-defined]
        if dist.is_initialized():
            _check_group(self.world_size)  # type: ignore[attr-defined]
        elif self.world_size > 1:  # type: ignore[attr-defined]
            environment = self.cluster_environment
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
            # Each gloo group of each rank would connect with every other rank: more open files than a process may have.
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            # Of the rest, rank 0's store and the exchange between CPU processes have one per rank (docs/scaling.md).
            allow_open_files(files_of_a_run(self.world_size))  # type: ignore[attr-defined]
            rank, size = self.global_rank, self.world_size  # type: ignore[attr-defined]
            keeps_store = rank == 0 and not rendezvous.is_kept_by_agent()
            require_open_files(size, self.root_device.type == "cpu", keeps_store)  # type: ignore[attr-defined]
            limit: timedelta = timeout_of(self) or default_pg_timeout  # type: ignore[arg-type]
            backend = backend_of(self)
            rank_zero_info(f"Initializing distributed: {size} ranks, backend {backend}")
            expected = f"devices={self.num_processes}, num_nodes={self.num_nodes}"  # type: ignore[attr-defined]
            is_over = session.lacks_a_rank if (session := current()) is not None else lambda: False
            at = environment.main_address, environment.main_port
            store = rendezvous.meet(*at, rank, size, expected, is_over)
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
