"""Saves that take long: what memory they need, and where a rank saves alone or fails alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.helpers import moves, saving
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.zoo import make_trainer


@pytest.mark.parametrize("form", ["file", "sharded-async"])
def test_memory_while_saving_stays_within_bounds(form: str) -> None:
    """Of 1 GiB of parameters: `python benchmarks/checkpoints.py memory`."""
    with RankPool() as pool:  # fresh processes, whose allocators hold nothing that earlier tests left
        memory = saving.measure(form, pool.run, 3000, 6)
    assert not memory.beyond, memory


def _alone() -> None:
    class Alone(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
            if trainer.is_global_zero:
                trainer.save_checkpoint("/nonexistent/x.ckpt")

    strategy = {"stage": 3, "min_unit_numel": 1, "timeout_seconds": 10.0}
    make_trainer(strategy, max_steps=4, callbacks=[Alone()]).fit(moves.Features(), moves.loader("epoch end", 2))


def test_a_collective_call_on_one_rank_alone_raises_naming_it(ranks2) -> None:
    with pytest.raises(RankError) as error:
        ranks2(_alone)
    ours = next(f.text for f in error.value.failures if f.rank == 0)
    call = "trainer.save_checkpoint() on rank 0"
    assert f"RuntimeError: {call}: not all ranks made this call within timeout_seconds=10" in ours


def _reads_values_while_saving(path: str) -> None:
    class Reads(moves.Features):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["norm"] = checkpoint["state_dict"]["first.weight"].norm().item()

    trainer = make_trainer({"stage": 3, "min_unit_numel": 1}, max_steps=2, callbacks=[moves._SaveAt(1, path)])
    trainer.fit(Reads(), moves.loader("epoch end", 2))


def test_reading_values_in_on_save_checkpoint_on_other_ranks_says_what_to_do(ranks2, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"if self.trainer.is_global_zero"):
        ranks2(_reads_values_while_saving, str(tmp_path / "x.ckpt"))
