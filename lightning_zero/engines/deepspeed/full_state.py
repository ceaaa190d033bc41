"""Reads state from DeepSpeed's pieces: for checkpoints, user code, reports of memory, and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_zero.checkpoint.later import Value
from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.shards import as_shard, local
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.after_run import LeftState, leave_parameter
from lightning_zero.engines.base import undetached_state_dict
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.store import State
from lightning_zero.engines.model_state import ModelState, states_of
from lightning_zero.engines.optimizer_family import family, states


class FullState:
    """Assembles full tensors from DeepSpeed's pieces.

    All methods are collective. They read masters, so the engine must store user code's writes to parameters before
    (``DeepSpeedEngine.settle``).
    """

    def __init__(self, params: Parameters, mesh: DeviceMesh) -> None:
        self._params, self._mesh = params, mesh

    # -- rows, as checkpoints hold them --------------------------------------------------------------------------

    def rows(self, full: Tensor) -> Tensor:
        """Copies this rank's rows of a full tensor to a ``DTensor``, sharded on dim 0 as by ``fully_shard``; returns a
        0-dim tensor itself."""
        if full.dim() == 0:
            return full
        each = -(-full.shape[0] // self._mesh.size())
        first = min(each * self._mesh.get_rank(), full.shape[0])
        mine = full.narrow(0, first, min(each, full.shape[0] - first)).clone()
        return DTensor.from_local(mine, self._mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())

    def state_dict(self) -> dict[str, Any]:
        """Returns the module's state dict in rows; a tied parameter is one object under all its names."""
        done: dict[int, Tensor] = {}

        def one(path: Any, tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                held = tensor in self._params.held
                done[id(tensor)] = self.rows(private.gathered_copy(tensor)) if held else tensor.detach()
            return done[id(tensor)]

        return map_tensors(one, undetached_state_dict(self._params.module))

    def optimizer_state(self, state: dict[str, Any], known: Callable[[Any], State | None]) -> dict[str, Any]:
        """Returns ``optimizer.state_dict()`` in rows; ``known`` returns the ``State`` of those that are pieces."""

        def one(path: Any, tensor: Tensor) -> Tensor:
            found = known(tensor)
            if found is not None:
                return self.rows(self._params.attached.assemble(found.parameter, found.piece))
            return self.rows(private.gathered_copy(tensor)) if tensor in self._params.held else tensor

        return map_tensors(one, state)

    def leave_states(self, optimizers: Iterable[Optimizer], known: Callable[[Any], State | None], failed: bool) -> None:
        """Replaces pieces in the states of ``optimizers`` by rows (collective). After a run that ``failed`` other ranks
        may be gone: then by states that assemble the pieces when user code touches them."""
        for p, entry in (each for o in optimizers for of_all in states(family(o)) for each in of_all.items()):
            for key, value in entry.items():
                if (found := known(value)) is not None and failed:
                    entry[key] = LeftState.of(self._params.attached.assembly(p, found.piece), value)
                elif found is not None:
                    entry[key] = self.rows(self._params.attached.assemble(p, found.piece))

    # -- after the run -------------------------------------------------------------------------------------------

    def values_afterwards(self) -> dict[Tensor, Tensor]:
        """Returns full parameters on the CPU, in the user's strides."""
        params = self._params
        return {
            p: torch.empty_strided(shape, params.strides[p], dtype=p.dtype).copy_(private.gathered_copy(p))
            for p, shape in params.shapes.items()
        }

    def leave_parameters(self, failed: bool) -> None:
        """Leaves this rank's rows of stage-3 parameters, on the CPU (collective). After a run that ``failed`` other
        ranks may be gone: then user code that touches a parameter assembles it from all ranks' shards."""
        for p in cast("Iterable[nn.Parameter]", self._params.held):
            like = torch.empty(self._params.shapes[p], dtype=p.dtype, device="meta")
            left: Value = private.assembly(p)
            if not failed:
                rows = self.rows(private.gathered_copy(p))
                left = as_shard(local(rows).cpu(), rows) if isinstance(rows, DTensor) else rows.cpu()
            leave_parameter(p, left, like)


def model_state(
    params: Parameters,
    optimizers: Iterable[Optimizer],
    known: Callable[[Any], State | None],
    config: ZeroConfig,
    device: torch.device,
) -> ModelState:
    """Counts the bytes on this rank, by kind and place; memory shared by several tensors once.

    DeepSpeed computes with one set of tensors and steps another, so *parameters* are the module's (stage 3: this rank's
    shards and all that is gathered) plus the masters. *Gradients* are averaged pieces, in buffers of their own.
    ``known`` returns the :class:`State` of an optimizer state that is a piece.
    """
    state, shards = ModelState(), params.shards
    counted: set[tuple[int, int]] = set()

    def here(kind: str, tensor: Tensor, moves: bool = False) -> None:
        """Counts bytes of this rank; without an accelerator, a tensor that offload ``moves`` counts as host memory."""
        nbytes = tensor.numel() * tensor.element_size()
        where = (tensor.data_ptr(), nbytes)
        if nbytes and where not in counted:
            counted.add(where)
            on_host = moves if device.type == "cpu" else tensor.device.type == "cpu"
            state.add_bytes(kind, nbytes, "host" if on_host else "device")

    for p, shape in params.shapes.items():
        state.full["parameters"] += shape.numel() * p.element_size()
        here("parameters", p.detach())
        if (cut := private.cut_of(p)) is not None:
            here("parameters", cut.detach(), config.offloads_parameters)
    if shards is not None:
        for i in {piece.flat for piece in shards.pieces.values()}:
            here("parameters", shards.flat_master(i), config.offloads_optimizer)
        for flat in shards.grad_buffers():
            here("gradients", flat, config.offloads_optimizer)
        for p in shards.with_grad:
            state.full["gradients"] += params.shapes[p].numel() * p.element_size()
    for p, value in states_of(optimizers):
        found = known(value)
        part, numel = (value, value.numel()) if found is None else (found.piece, params.shapes[p].numel())
        state.full["optimizer"] += numel * part.element_size()
        here("optimizer", part, config.offloads_optimizer)
    return state
