"""Keeps the number of samples per optimizer step when a run continues with another number of ranks.

With N ranks, micro-batches of b samples and accumulation A, an optimizer step takes N A b samples. If N changes, A must
change, and with it the number of micro-batches done in the epoch: ``DistributedSampler`` distributes the samples of A
old micro-batches of all ranks over A' new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_zero.checkpoint.layout import ACCUMULATION, EXTRA

_PROGRESS = "epoch_loop.batch_progress"


def keep_global_batch(checkpoint: Mapping[str, Any], trainer: Any, world_size: int) -> None:
    """Sets ``trainer.accumulate_grad_batches``, and converts the progress in ``checkpoint`` to the new micro-batches.

    Logs a line if the accumulation changes.

    Raises:
        ValueError: If no number of micro-batches gives the same batch, or ``checkpoint`` does not record the batch.
    """
    kept = checkpoint.get(EXTRA, {})
    ranks, before = len(kept.get("ranks", ())), kept.get(ACCUMULATION)
    if not ranks or before is None:
        raise ValueError(
            "keep_global_batch=True: the checkpoint does not record how many ranks wrote it; set"
            " accumulate_grad_batches yourself and keep_global_batch=False."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ValueError(
            "keep_global_batch=True with a GradientAccumulationScheduler, which sets accumulate_grad_batches itself:"
            " use one of them."
        )
    now, rest = divmod(before * ranks, world_size)
    if rest:
        possible = ", ".join(str(n) for n in range(1, before * ranks + 1) if before * ranks % n == 0)
        raise ValueError(
            f"keep_global_batch=True: {ranks} ranks accumulated {before} micro-batch(es) per step, which cannot be"
            f" divided equally among {world_size} ranks: use one of {possible} ranks."
        )
    trainer.accumulate_grad_batches = now
    if now == before:
        return
    for progress in _progress_of(checkpoint):
        _rescale(progress, now, before)
    rank_zero_info(
        f"keep_global_batch: {world_size} ranks accumulate {now} micro-batch(es) per step; {ranks} ranks accumulated"
        f" {before}."
    )


def _progress_of(checkpoint: Mapping[str, Any]) -> list[dict[str, int]]:
    found = checkpoint.get("loops", {}).get("fit_loop", {}).get(_PROGRESS, {})
    return [found[name] for name in ("total", "current") if name in found]


def _rescale(progress: dict[str, int], now: int, before: int) -> None:
    """Converts counts of micro-batches from accumulation ``before`` to ``now``. ``completed`` may be one behind
    ``ready``: the checkpoint was then written at the end of that micro-batch."""
    ready = progress["ready"]
    new = ready // before * now + ready % before * now // before  # rounds down: an incomplete step is repeated in part
    for name, value in progress.items():
        progress[name] = max(new - (ready - value), 0)
