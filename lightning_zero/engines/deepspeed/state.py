"""The tensors of a rank under DeepSpeed, and their places.

DeepSpeed computes with one set of tensors and steps another: *parameters* are those of the module (stage 3: this rank's
cuts, and whatever is gathered) and the masters; *gradients* its averaged pieces, which live in buffers of their own;
*optimizer* the states of the users' optimizers.
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
    """Counts each piece of memory once.

    Args:
        config: Its offload settings count.
        device: Of this rank.
        shapes: Every parameter's own shape.
    """

    def __init__(self, config: ZeroConfig, device: torch.device, shapes: Mapping[Tensor, torch.Size]) -> None:
        self.config, self.device, self.shapes = config, device, shapes
        self.state = ModelState()
        self._ranges: set[tuple[int, int]] = set()

    def parameters(self, odd: Iterable[Tensor]) -> None:
        """The module's own, whole or cut."""
        whole = set(odd)
        for p, shape in self.shapes.items():
            self.state.whole["parameters"] += shape.numel() * p.element_size()
            self.held("parameters", p.detach(), "device")
            cut = private.cut_of(p)
            if cut is not None and p not in whole:
                self.held("parameters", cut.detach(), self._place(cut, self.config.offloads_parameters))

    def managed(self, managed: Managed) -> None:
        """Masters and gradients."""
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
        """States; ``known`` tells those that are pieces."""
        whole = set(odd)
        for p, value in states_of(optimizers):
            found = known(value)
            part = value if found is None else found.piece
            numel = value.numel() if found is None else self.shapes[p].numel()
            self.state.whole["optimizer"] += numel * part.element_size()
            self.held("optimizer", part, "device" if p in whole else self._place_of_steps(part))

    def held(self, kind: str, tensor: Tensor, place: str) -> None:
        """Counts ``tensor`` here, unless this very memory was counted."""
        nbytes = tensor.numel() * tensor.element_size()
        where = (tensor.data_ptr(), nbytes)
        if nbytes and where not in self._ranges:
            self._ranges.add(where)
            self.state.add_bytes(kind, nbytes, place)

    def _place_of_steps(self, tensor: Tensor) -> str:
        return self._place(tensor, self.config.offloads_optimizer)

    def _place(self, tensor: Tensor, moves: bool) -> str:
        """On a machine without accelerator what would be moved counts as moved (see ``model_state``)."""
        if self.device.type == "cpu":
            return "host" if moves else "device"
        return "host" if tensor.device.type == "cpu" else "device"
