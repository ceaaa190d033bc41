"""How ``lightning-zero check`` judges: nothing that is not a number, or is missing, counts as equal."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_zero.app import check_ranks

NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "expected", "most"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([NAN], [1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_losses(losses: list[float], expected: list[float], most: float) -> None:
    assert check_ranks.difference(torch.tensor(losses), torch.tensor(expected)) == pytest.approx(most)


def test_weights_are_measured_by_the_way_they_came() -> None:
    initial, expected = torch.zeros(4), torch.ones(4)
    assert check_ranks.distance(expected, expected, initial) == 0.0
    assert check_ranks.distance(initial, expected, initial) == pytest.approx(1.0)
    assert check_ranks.distance(torch.full((4,), NAN), expected, initial) == math.inf
    assert check_ranks.distance(torch.empty(0), expected, initial) == math.inf


def test_communication_counts_where_no_other_kernel_runs() -> None:
    """On streams of their own: two of compute overlap, a reduction reaches beyond them, and a gather lies within."""
    kernels = [("gemm", 0, 4), ("add", 3, 6), ("ncclDevKernel_ReduceScatter", 5, 9), ("ncclDevKernel_AllGather", 1, 2)]
    assert check_ranks.exposed_share([*kernels, ("copy", 9, 10)]) == pytest.approx(3 / 10)
