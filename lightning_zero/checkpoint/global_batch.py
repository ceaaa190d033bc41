"""A run that goes on with another number of ranks takes as many samples per optimizer step as before.

With N ranks, micro-batches of b samples and A of them accumulated, a step takes N A b samples. What changes with N is
A, and with it how many micro-batches of the epoch are done: ``DistributedSampler`` deals the samples of A old
micro-batches of all ranks into A' new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_zero.checkpoint.layout import ACCUMULATION, EXTRA

_PROGRESS = "epoch_loop.batch_progress"


def keep_global_batch(checkpoint: Mapping[str, Any], trainer: Any, world_size: int) -> None:
    """Sets ``trainer.accumulate_grad_batches``, and the progress in ``checkpoint`` to micro-batches of that size.

    Where that is a change, a line says so.

    Raises:
        ValueError: Where no number of micro-batches makes up the same batch, or ``checkpoint`` does not tell it.
    """
    kept = checkpoint.get(EXTRA, {})
    ranks, before = len(kept.get("ranks", ())), kept.get(ACCUMULATION)
    if not ranks or before is None:
        raise ValueError(
            "keep_global_batch=True: the checkpoint does not tell how many ranks wrote it; set"
            " accumulate_grad_batches yourself and keep_global_batch=False."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ValueError(
            "keep_global_batch=True beside a GradientAccumulationScheduler, which sets accumulate_grad_batches itself:"
            " use one of them."
        )
    now, rest = divmod(before * ranks, world_size)
    if rest:
        possible = ", ".join(str(n) for n in range(1, before * ranks + 1) if before * ranks % n == 0)
        raise ValueError(
            f"keep_global_batch=True: {ranks} ranks accumulated {before} micro-batch(es) per step, which {world_size}"
            f" ranks cannot share equally: use one of {possible} ranks."
        )
    trainer.accumulate_grad_batches = now
    if now == before:
        return
    for progress in _progress_of(checkpoint):
        _rescale(progress, now, before)
    rank_zero_info(
        f"keep_global_batch: {world_size} ranks accumulate {now} micro-batch(es) per step, where {ranks} accumulated"
        f" {before}."
    )


def _progress_of(checkpoint: Mapping[str, Any]) -> list[dict[str, int]]:
    found = checkpoint.get("loops", {}).get("fit_loop", {}).get(_PROGRESS, {})
    return [found[name] for name in ("total", "current") if name in found]


def _rescale(progress: dict[str, int], now: int, before: int) -> None:
    """``completed`` may be behind ``ready`` by the one micro-batch in whose end the checkpoint was written."""
    ready = progress["ready"]
    new = ready // before * now + ready % before * now // before  # a window that was not full begins anew below
    for name, value in progress.items():
        progress[name] = max(new - (ready - value), 0)
