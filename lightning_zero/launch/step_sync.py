"""The step sync: between steps the ranks agree that all continue, or that all end.

Before each training batch, around each validation and at the end of an epoch the ranks exchange one small message on
the host: each rank's place in the loop, and whether it was asked to end. If places differ, a dataloader has ended early
on some ranks, and all ranks raise the same error instead of waiting for each other. If any rank was asked to end
(SIGTERM, or SIGUSR1 under SLURM), all ranks finish the step, save a checkpoint and exit. The signal handler only sets a
flag. Ctrl-C is an ordinary exception of rank 0.

On an accelerator a training batch's message is under way while the forward is queued. On a CPU the rank waits for it at
once, because a forward may start a collective that a rank at another place does not join. The message replaces
Lightning's broadcast before each batch, which waits for the device.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.pytorch import Callback
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_zero.comm.agree import STEP_SYNC, Agreement, run_agreement, shared_agreement
from lightning_zero.config import Uneven
from lightning_zero.launch import restart
from lightning_zero.launch.failure import saves_on_exception, tell
from lightning_zero.launch.shortest import cut
from lightning_zero.launch.supervisor import PREEMPTED_EXIT_CODE
from lightning_zero.private.lightning import (
    answer_signals_by,
    change_training_loader,
    set_on_instance,
    timeout_of,
    without_sigterm_broadcast,
)
from lightning_zero.private.torch import DisableTorchFunction

_PLACES = {
    1: "begins training batch {}",
    2: "begins a validation after {} training batches",
    3: "fetches a batch after {} training batches",
    4: "ends its validation after {} training batches",
    5: "ends its epoch after {} training batches",
    6: "ends its training after {} steps",
}
_SHIFT = 40
_RAN_DRY = 1 << 8
"""Flag for an exhausted loader in a message; above all signal numbers, so that it wins the maximum."""


class StepSync(Callback):
    """The callback that exchanges the messages; see the module's docstring. This package's strategies add it.

    At most one message is under way: :meth:`_send` first completes the preceding one. So the n-th messages of all ranks
    always belong together. The callback holds no state of the training.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._agreement: Agreement | None = None
        self._peer_memory: Any = None
        self._pending: tuple[Any, torch.Tensor, int] | None = None
        self._signal: int | None = None
        self._agreed: int = 0
        self._step = -1
        self._loop: Any = None
        self.undo = ExitStack()
        """Undoes the changes to the Trainer and its parts."""
        self._users_sigterm = callable(signal.getsignal(signal.SIGTERM))
        """Whether the user has a handler of SIGTERM. Lightning calls it after ours."""
        self._begun = False

    # -- beginning and end ---------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(trainer)

    on_sanity_check_start = on_train_start

    def _begin(self, trainer: Any) -> None:
        if self._loop is not None:
            return
        self._loop = loop = trainer.fit_loop.epoch_loop
        advance = loop.advance

        def watched(data_fetcher: Any) -> None:
            self._begun = True
            self._end_if_agreed(trainer)
            advance(data_fetcher)

        self.undo.callback(set_on_instance(loop, "advance", watched))
        self.undo.callback(without_sigterm_broadcast(loop))
        if trainer.world_size > 1:
            # Messages of a separate kind: ranks at different places would confuse them with the engine's messages.
            limit = (timeout_of(self._strategy) or timedelta(minutes=30)).total_seconds()
            self._agreement = run_agreement() or shared_agreement(limit)
            self._peer_memory = getattr(getattr(self._strategy, "engine", None), "peer_memory", None)
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and _slurm_job() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            # Lightning registers it only where its own environment requeues
            self.undo.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, self.on_signal))

    def on_signal(self, number: int, frame: Any) -> None:
        """Handles SIGTERM and SIGUSR1."""
        if number == signal.SIGTERM and not self._begun and not self._users_sigterm:
            signal.signal(number, signal.SIG_DFL)  # nothing to save yet, and the first step may take minutes to come
            os.kill(os.getpid(), number)
        self._signal = max(self._signal or 0, number)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.undo.close()
        self._loop = self._agreement = self._peer_memory = self._pending = None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            restart.forget()

    # -- this rank's place in the loop ---------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._send(1, batch_idx)
        if self._strategy.root_device.type == "cpu":
            self.recv()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.recv()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.recv()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._send(2, trainer.fit_loop.epoch_loop.batch_idx + 1)
        self.recv()

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Serves ranks that have more batches, whose forwards need this rank's shards.

        It must happen before user code or a metric waits for those ranks.
        """
        if (engine := getattr(self._strategy, "engine", None)) is not None:
            engine.end_window()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._send(4, trainer.fit_loop.epoch_loop.batch_idx + 1)
        self.recv()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._send(5, trainer.fit_loop.epoch_loop.batch_idx + 1)
        self.recv()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._send(6, trainer.global_step)
        self.recv()

    # -- training loaders that differ in length ------------------------------------------------------------------

    def shortest(self, trainer: Any, length: float) -> float:
        """Returns the smallest ``length`` of all ranks' training loaders (collective)."""
        self._begin(trainer)
        assert self._agreement is not None
        self._end_window()
        return min(self._agreement.gather(length, "the lengths of the training loaders"))

    def any_ran_dry(self, this: bool) -> bool:
        """Returns whether any rank's training loader is exhausted; ``this`` is this rank's answer (collective)."""
        self._send(3, self._loop.batch_idx + 1, _RAN_DRY * this)
        return self.recv()

    # -- messages ------------------------------------------------------------------------------------------------

    def _end_window(self) -> None:
        """Serves other ranks' reads in hooks that this rank has left already."""
        if (engine := getattr(self._strategy, "engine", None)) is not None:
            engine.end_window(engine.hooks.anywhere)

    def _send(self, place: int, index: int, dry: int = 0) -> None:
        if self._loop is None:
            return
        asked = dry or self._signal or 0  # a signal that dry hides here is sent again with the next message
        if self._agreement is None:
            self._agreed = max(self._agreed, asked)
            return
        self.recv()
        self._end_window()  # before the message: a rank that waits for a read cannot send its own
        here = (place << _SHIFT) + max(index, 0)
        with DisableTorchFunction():  # the engine's function mode must not intercept this tensor
            message = torch.tensor([here, -here, asked], device="cpu")  # max(-here) is minus the smallest place
            work = self._agreement.all_reduce(message, dist.ReduceOp.MAX, STEP_SYNC, self._peer_memory)
        self._pending = (work, message, here)

    def recv(self) -> bool:
        """Completes the message under way, if any; returns whether any rank's training loader is exhausted.

        Raises:
            ValueError: On all ranks, if their places differ.
        """
        if self._pending is None:
            return False
        (work, message, here), self._pending = self._pending, None
        with DisableTorchFunction():
            work.wait()
            furthest, nearest, asked = message.tolist()  # on the host: this does not wait for the device
        if furthest != -nearest:
            self._refuse(here)
        if asked >= _RAN_DRY:
            return True
        self._agreed = max(self._agreed, asked)
        return False

    def _refuse(self, here: int) -> None:
        assert self._agreement is not None
        places: dict[int, list[int]] = {}
        for rank, place in enumerate(self._agreement.with_kind(STEP_SYNC).gather(here, "the step sync")):
            places.setdefault(place, []).append(rank)
        said = "; ".join(
            f"rank {', '.join(map(str, ranks))} {_PLACES[place >> _SHIFT].format(place & ((1 << _SHIFT) - 1))}"
            for place, ranks in sorted(places.items())
        )
        raise ValueError(
            f"the ranks no longer run the same steps: {said}. If a dataloader has fewer batches on some ranks, give all"
            " ranks the same number (a DistributedSampler, drop_last=True, trainer.limit_train_batches,"
            " trainer.limit_val_batches), or end with the shortest (the strategy's uneven='shortest'). If a callback"
            " stops some ranks alone, give all ranks the same callbacks, and log the values that they watch with"
            " sync_dist=True."
        )

    # -- ending on request ---------------------------------------------------------------------------------------

    def _end_if_agreed(self, trainer: Any) -> None:
        """Ends the run if the ranks have agreed to. Called before each batch.

        It acts only between two steps, because a checkpoint does not hold partly accumulated gradients.
        """
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if not self._agreed or not (stepped or trainer.fit_loop.epoch_loop.batch_idx < 0):
            return
        number = signal.Signals(self._agreed)
        requeue = number != signal.SIGTERM
        rank_zero_only(tell)(f"{number.name} received: ending after step {trainer.global_step}")
        if trainer.checkpoint_callbacks or _slurm_job():
            path = _checkpoint_folder(trainer) / restart.PREEMPTED
            trainer.save_checkpoint(path)
            rank_zero_only(tell)(f"checkpoint of step {trainer.global_step}: {path}")
        if requeue and trainer.is_global_zero:
            _requeue()
        sys.exit(PREEMPTED_EXIT_CODE)


def sync_steps(trainer: Any, strategy: Any, uneven: Uneven = "error") -> StepSync:
    """Adds a :class:`StepSync` to ``trainer``, in front of all other callbacks.

    Raises:
        ValueError: On all ranks, if ``uneven="shortest"`` and the module's step fetches its batches itself.
    """
    ends_with_shortest = uneven == "shortest" and trainer.world_size > 1
    step = trainer.lightning_module.training_step
    if ends_with_shortest and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise ValueError(
            "uneven='shortest' with training_step(self, dataloader_iter): a step that fetches its batches itself would"
            " find the end of the epoch in its middle. Take the batch as an argument, or use uneven='error'."
        )
    for old in [callback for callback in trainer.callbacks if isinstance(callback, StepSync)]:
        old.teardown(trainer, None, "")  # Lightning does not call teardown after a run that raised
    trainer.callbacks[:] = [callback for callback in trainer.callbacks if not isinstance(callback, StepSync)]
    trainer.callbacks.insert(0, watching := StepSync(strategy))
    if trainer.world_size > 1 and (savers := saves_on_exception(trainer)):
        names = ", ".join(sorted({type(callback).__name__ for callback in savers}))
        rank_zero_warn(
            f"{names}: with several ranks it saves no checkpoint on an error or on Ctrl-C, after which ranks may be"
            " anywhere. Save at intervals too (ModelCheckpoint(every_n_train_steps=...)). To end a run with a"
            " checkpoint, send SIGTERM to rank 0."
        )
    answer_signals_by(trainer, watching.on_signal)
    if ends_with_shortest:
        watching.undo.callback(change_training_loader(trainer, partial(cut, trainer=trainer, sync=watching)))
    return watching


def _checkpoint_folder(trainer: Any) -> Path:
    callback = trainer.checkpoint_callback
    folder = getattr(callback, "dirpath", None) or os.path.join(trainer.default_root_dir, "checkpoints")
    return Path(trainer.strategy.broadcast(str(folder)))


def _slurm_job() -> str | None:
    name = restart.run_name()
    return name.removeprefix("slurm-") if name and name.startswith("slurm-") else None


def _requeue() -> None:
    job = _slurm_job()
    if job is None:
        return
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    outcome = "requeued" if done.returncode == 0 else f"could not be requeued: {done.stderr.strip()}"
    tell(f"SLURM job {job} {outcome}")
