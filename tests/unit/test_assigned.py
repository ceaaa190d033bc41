"""What user code is told when it looks at gradients that are not what DDP would have."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist

from lightning_zero.engines.fsdp2.assigned import AssignedGradients


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first of two."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.mark.parametrize(("stage", "times"), [(1, 0), (2, 1), (3, 1)])
def test_a_mean_between_micro_batches_is_told_of_once(ranks: None, stage: int, times: int) -> None:
    """Not at stage 1, where it is this rank's own, nor before gradients are accumulated."""
    accumulates = [False]
    gradients = AssignedGradients(stage, lambda: accumulates[0])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gradients.noticed()
        assert not told
        accumulates[0] = True
        for _ in range(2):
            gradients.noticed()
    assert [f"at stage {stage} it is reduced after each" in str(each.message) for each in told] == [True] * times
