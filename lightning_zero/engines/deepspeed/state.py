"""Counts a rank's memory under DeepSpeed, by kind and place.

DeepSpeed computes with one set of tensors and steps another, so *parameters* are the module's (stage 3: this rank's
shards and all that is gathered) plus the masters; *gradients* are DeepSpeed's averaged pieces, in buffers of their own;
*optimizer* are the states of the users' optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.config import ZeroConfig
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.optimizer_step import Managed
from lightning_zero.engines.deepspeed.store import State
from lightning_zero.engines.model_state import ModelState, states_of


class Account:
    """Sums up bytes; memory shared by several tensors is counted once.

    Args:
        config: Read for its offload settings.
        device: This rank's device.
        shapes: The full shape of every parameter.
    """

    def __init__(self, config: ZeroConfig, device: torch.device, shapes: Mapping[Tensor, torch.Size]) -> None:
        self.config, self.device, self.shapes = config, device, shapes
        self.state = ModelState()
        self._ranges: set[tuple[int, int]] = set()

    def parameters(self, odd: Iterable[Tensor]) -> None:
        """Counts the module's parameters, full or sharded."""
        whole = set(odd)
        for p, shape in self.shapes.items():
            self.state.whole["parameters"] += shape.numel() * p.element_size()
            self.held("parameters", p.detach(), "device")
            cut = private.cut_of(p)
            if cut is not None and p not in whole:
                self.held("parameters", cut.detach(), self._place(cut, self.config.offloads_parameters))

    def managed(self, managed: Managed) -> None:
        """Counts masters and gradients."""
        shards = managed.shards
        for i in managed.flats(shards.pieces):
            self.held("parameters", shards.master(i), self._place_of_steps(shards.master(i)))
        for flat in shards.grad_buffers():
            self.held("gradients", flat, self._place_of_steps(flat))
        for p in managed.with_grad:
            self.state.whole["gradients"] += self.shapes[p].numel() * p.element_size()

    def odd_gradients(self, odd: Iterable[Tensor]) -> None:
        for p in odd:
            if p.grad is not None:
                self.state.whole["gradients"] += p.grad.numel() * p.grad.element_size()
                self.held("gradients", p.grad, "device")

    def optimizers(
        self, optimizers: Iterable[Optimizer], known: Callable[[Any], State | None], odd: Iterable[Tensor]
    ) -> None:
        """Counts optimizer states; ``known`` returns the :class:`State` of those that are pieces."""
        whole = set(odd)
        for p, value in states_of(optimizers):
            found = known(value)
            part = value if found is None else found.piece
            numel = value.numel() if found is None else self.shapes[p].numel()
            self.state.whole["optimizer"] += numel * part.element_size()
            self.held("optimizer", part, "device" if p in whole else self._place_of_steps(part))

    def held(self, kind: str, tensor: Tensor, place: str) -> None:
        """Counts the bytes of ``tensor``, unless the same memory was counted before."""
        nbytes = tensor.numel() * tensor.element_size()
        where = (tensor.data_ptr(), nbytes)
        if nbytes and where not in self._ranges:
            self._ranges.add(where)
            self.state.add_bytes(kind, nbytes, place)

    def _place_of_steps(self, tensor: Tensor) -> str:
        return self._place(tensor, self.config.offloads_optimizer)

    def _place(self, tensor: Tensor, moves: bool) -> str:
        """Returns ``"host"`` or ``"device"``; without an accelerator, what offload would move counts as ``"host"``."""
        if self.device.type == "cpu":
            return "host" if moves else "device"
        return "host" if tensor.device.type == "cpu" else "device"
