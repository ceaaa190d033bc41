"""Saves and restores what Lightning does not: random states and loader positions, for an exact continuation.

[Saved per rank under ``checkpoint["lightning_zero"]``]
- *rng*: the states of Python, NumPy, torch and the accelerator when the checkpoint was written.
- *orders*: for each map-style training loader, the state from which its sampler drew the current epoch's order.
- *loaders*: the ``state_dict`` of each training loader that has one (Lightning saves only rank 0's).

[On resume]
In mid-epoch the sampler of a map-style loader draws the same order again and skips the batches that are done. This
works at any world size: with the same global batch, ``DistributedSampler`` puts the same samples into each batch. With
several training loaders Lightning replays the epoch. If the number of ranks is unchanged, random states are set just
before the next batch is fetched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.checkpoint.layout import EXTRA
from lightning_zero.checkpoint.store import together
from lightning_zero.comm.agree import Agreement
from lightning_zero.private.lightning import combined_loader, data_fetcher, set_restarting

# -- random states ---------------------------------------------------------------------------------------------------


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """Returns the global random states as tensors and numbers, which ``weights_only`` loading admits."""
    version, words, gauss = random.getstate()
    of_numpy: Any = numpy.random.get_state()
    name, keys, position, has_gauss, cached = of_numpy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words, device="cpu"), gauss),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
    }
    if device is not None and device.type != "cpu":
        state["device"] = getattr(torch, device.type).get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Sets the global random states to a result of :func:`rng_state`."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "device" in state and device is not None and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state["device"], device)


# -- loaders ---------------------------------------------------------------------------------------------------------


class _Order:
    """A loader's (batch) sampler that records how its order was drawn, and can skip batches once."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.drawn_from: dict[str, Any] | None = None
        self.resume_from: dict[str, Any] | None = None
        self.num_done = 0

    def __iter__(self) -> Iterator[Any]:
        num_done, self.num_done = self.num_done, 0
        again, self.resume_from = self.resume_from, None
        self.drawn_from = again or rng_state()
        with isolate_rng(include_cuda=False) if again and num_done else nullcontext():
            if again and num_done:
                set_rng_state(again)
            batches = iter(self._sampler)
            for _ in islice(batches, num_done):
                pass
        yield from batches

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up before _sampler is set
            raise AttributeError(name)
        return getattr(self.__dict__["_sampler"], name)


def follow(loader: Any) -> Any:
    """Makes the order of a map-style training ``loader`` resumable, in place; returns the loader."""
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not _is_stateful(loader):
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, which)
        if not isinstance(sampler, _Order):
            # DataLoader forbids this assignment to keep its settings consistent; an _Order changes none of them.
            object.__setattr__(loader, which, _Order(sampler))
    return loader


def _order_of(loader: Any) -> _Order | None:
    found = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    return next((each for each in found if isinstance(each, _Order)), None)


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _loaders(trainer: Any) -> list[Any]:
    combined = combined_loader(trainer)
    return [] if combined is None else list(combined.flattened)


# -- saving and resuming ---------------------------------------------------------------------------------------------


def collect(trainer: Any, agreement: Agreement) -> dict[str, Any]:
    """Returns the content of :data:`~lightning_zero.checkpoint.layout.EXTRA` (collective)."""
    ranks = agreement.gather(together(agreement, lambda: _of_this_rank(trainer)))
    return {"ranks": ranks}


def _of_this_rank(trainer: Any) -> dict[str, Any]:
    loaders = _loaders(trainer)
    return {
        "rng": rng_state(trainer.strategy.root_device),
        "orders": [order and order.drawn_from for order in map(_order_of, loaders)],
        "loaders": [loader.state_dict() for loader in loaders if _is_stateful(loader)],
    }


def resume(checkpoint: dict[str, Any], trainer: Any, agreement: Agreement) -> None:
    """Restores loaders and random states from ``checkpoint``. Call it before the first batch is fetched."""
    ranks = checkpoint.get(EXTRA, {}).get("ranks", [])
    same = len(ranks) == agreement.world_size
    mine = ranks[agreement.rank] if same else (ranks[0] if ranks else {})
    num_done = _batches_done(trainer)

    def set_rng() -> None:
        if same and "rng" in mine:
            set_rng_state(mine["rng"], trainer.strategy.root_device)

    if num_done is None:
        set_rng()  # before the new epoch draws its order
    loaders = _loaders(trainer)
    kept_by_lightning = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    _set_states(trainer, loaders, mine.get("loaders") or kept_by_lightning.get("combined_loader", []))
    if num_done and len(loaders) == 1 and (order := _order_of(loaders[0])) is not None:
        order.num_done, order.resume_from = num_done, next(iter(mine.get("orders", [])), None)
        rank_zero_info(
            f"Resuming in mid-epoch: the map-style loader continues after batch {num_done}, although Lightning warns"
            " that it cannot be resumed."
        )
    fetcher = data_fetcher(trainer)
    if fetcher is not None:
        iter(fetcher)  # as Lightning does at an epoch's start: earlier iterators would ignore the changes above
    if num_done is not None:
        set_rng()


def _set_states(trainer: Any, loaders: list[Any], states: list[Any]) -> None:
    stateful = [loader for loader in loaders if _is_stateful(loader)]
    if trainer.fit_loop.restarting and len(states) == len(stateful):
        for loader, state in zip(stateful, states, strict=True):
            loader.load_state_dict(state)


def leave_finished_epoch(fit_loop: Any) -> None:
    """Lets a run with ``max_steps`` begin the next epoch after a checkpoint from the end of an epoch.

    Lightning treats every resumed run with ``max_steps`` as one in mid-epoch (``_FitLoop.restarting``) and trains one
    batch too many in the finished epoch. Call this after Lightning restores the loops and before it runs them.
    """
    epoch = fit_loop.epoch_progress.current
    if epoch.ready == epoch.started == epoch.processed:
        set_restarting(fit_loop, False)


def _batches_done(trainer: Any) -> int | None:
    """Number of batches of the current epoch that are done; ``None`` between epochs."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    done = progress.current.completed + int(loop.restarted_on_train_batch_end)
    epoch = trainer.fit_loop.epoch_progress.current
    between = epoch.ready == epoch.processed or progress.is_last_batch or done >= trainer.num_training_batches
    return None if between else done
