"""What rank 0 may collect for one file."""

from __future__ import annotations

import torch

from lightning_zero.checkpoint import collected
from lightning_zero.checkpoint.layout import full_bytes


def test_a_limit_of_address_space_is_named_before_anything_is_sent(monkeypatch):
    memory = collected.Collected([None])
    monkeypatch.setattr(collected, "own_room_bytes", lambda: None)
    assert memory.why_not(1 << 60) is None
    monkeypatch.setattr(collected, "own_room_bytes", lambda: 3 << 30)
    assert memory.why_not(3 << 30) is None
    error = memory.why_not((3 << 30) + (1 << 29))
    assert "collects 3.50 GiB on rank 0, whose address space may grow by only 3.00 GiB" in str(error)
    assert "checkpoint='sharded'" in str(error)


def test_bytes_count_tied_tensors_once():
    tied = torch.zeros(4)
    assert full_bytes({"a": tied, "b": [tied, torch.zeros(3, dtype=torch.float64)], "c": 1}) == 16 + 24
