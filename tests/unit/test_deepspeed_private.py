"""Tells when a private part of DeepSpeed that we touch has moved: each is used here as the engine uses it."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.engines.deepspeed import private

deepspeed = pytest.importorskip("deepspeed")


def test_the_accelerator_is_the_runs() -> None:
    """Two runs of one process, on a CPU and on a GPU, in either order."""
    from deepspeed.accelerator import get_accelerator

    try:
        for kind in ("cpu", "cuda", "cpu"):
            private.use_accelerator(torch.device(kind))
            assert get_accelerator().device_name() == kind
            assert get_accelerator().communication_backend_name() == {"cpu": "gloo", "cuda": "nccl"}[kind]
    finally:
        private.use_accelerator(torch.device("cpu"))
