"""Private parts of other libraries whose loss no result would show: work on each step, and what only a GPU would meet.

That the names are there is checked when a strategy is made (``test_private_check.py``); that values are right is seen
by the parity tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_zero.engines.fsdp2 import private as fsdp2
from lightning_zero.private import lightning
from lightning_zero.private import torch as private


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Sequential]:
    """Two units on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = dist.init_device_mesh("cpu", (1,))
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh)
    fsdp2.init_now(model)
    yield model
    dist.destroy_process_group()


def test_hooks_are_hidden_from_dynamo_once(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than at each call, which takes longer than what they do; the end of the root's backward remains."""
    for unit in (model[0], model):
        fsdp2.hook_unit(unit, lambda: True)
        for group in fsdp2.groups(unit):
            fsdp2.hook_group(group, fsdp2.GroupHooks(), is_root=unit is model)
    hidden, disable = [], torch._dynamo.disable
    monkeypatch.setattr(torch._dynamo, "disable", lambda f, **more: hidden.append(f) or disable(f, **more))
    model(torch.ones(1, 4)).sum().backward()
    assert {f.__name__ for f in hidden} <= {"_root_post_backward_final_callback"}
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


def test_a_reduction_outside_of_the_backward_has_ended(model: nn.Sequential) -> None:
    """Otherwise an optimizer on a GPU may read gradients that are not reduced yet."""
    (inner,) = fsdp2.groups(model[0])
    fsdp2.hook_group(inner, fsdp2.GroupHooks(before_reduce=lambda g: False))  # left out
    model(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is None for p, _ in fsdp2.registrations(inner))
    fsdp2.reduce_now(inner)
    assert not getattr(inner.comm_ctx, "_last_post_reduce_events", None)  # of torch 2.13 and later
    assert all(p.grad is not None for p, _ in fsdp2.registrations(inner))


def test_transforms_are_torchs_own_after_the_last_run() -> None:
    """Runs may end in another order than they began in."""
    transforms = torch._functorch.apis.vmap_impl, torch._functorch.eager_transforms.grad_and_value_impl
    seen: list[int] = []
    ends = [private.before_transforms(lambda values, i=i: seen.append(i)) for i in range(3)]  # type: ignore[misc]
    for left in ({1, 2}, {1}, set()):
        ends.pop(0 if len(left) != 1 else 1)()
        seen.clear()
        torch.func.vmap(torch.sin)(torch.ones(2))
        assert set(seen) == left
    assert transforms == (torch._functorch.apis.vmap_impl, torch._functorch.eager_transforms.grad_and_value_impl)


def test_nothing_is_broadcast_before_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would wait there for a value of the device. Its method is back on the loop afterwards."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    calls = []
    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda self: calls.append(1))
    loop = Trainer(default_root_dir=tmp_path, accelerator="cpu", devices=1, logger=False).fit_loop.epoch_loop
    undo = lightning.without_sigterm_broadcast(loop)
    loop._broadcast_sigterm_tensor()
    assert not calls
    undo()
    loop._broadcast_sigterm_tensor()
    assert calls == [1]


def test_deepspeed_takes_the_accelerator_of_the_run() -> None:
    """Two runs of one process, on a CPU and on a GPU, in either order."""
    pytest.importorskip("deepspeed")
    from lightning_zero.engines.deepspeed import private as deepspeed

    with deepspeed.environment(torch.device("cpu")):
        from deepspeed.accelerator import get_accelerator

        try:
            for kind in ("cpu", "cuda", "cpu"):
                deepspeed.use_accelerator(torch.device(kind))
                assert get_accelerator().device_name() == kind
                assert get_accelerator().communication_backend_name() == {"cpu": "gloo", "cuda": "nccl"}[kind]
        finally:
            deepspeed.use_accelerator(torch.device("cpu"))
