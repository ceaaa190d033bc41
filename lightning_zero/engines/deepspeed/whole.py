"""Reads full state from DeepSpeed's pieces: for checkpoints, for user code, and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.engines.base import undetached_state_dict
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.store import State
from lightning_zero.engines.optimizer_family import family, states


class Whole:
    """Assembles full tensors from DeepSpeed's pieces.

    All methods are collective. They read masters, so the engine must store user code's writes to parameters before
    (``DeepSpeedEngine._settle``).
    """

    def __init__(self, params: Parameters, mesh: DeviceMesh) -> None:
        self._params, self._mesh = params, mesh

    # -- rows, as checkpoints hold them --------------------------------------------------------------------------

    def rows(self, p: Tensor, whole: Tensor) -> DTensor:
        """Copies this rank's rows of a full tensor to a ``DTensor``, sharded on dim 0 as by ``fully_shard``."""
        each = -(-whole.shape[0] // self._mesh.size())
        first = min(each * self._mesh.get_rank(), whole.shape[0])
        mine = whole.narrow(0, first, min(each, whole.shape[0] - first)).clone()
        return DTensor.from_local(
            mine, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the module's state dict in rows; a tied parameter is one object under all its names."""
        state = undetached_state_dict(self._params.module)
        done = self.rows_of_masters()

        def one(path: Any, tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = self._rows_of(tensor) if tensor in self._params.held else tensor.detach()
            return done[id(tensor)]

        return map_tensors(one, state)

    def rows_of_masters(self) -> dict[int, Tensor]:
        """Returns the rows of every master, by ``id`` of the parameter, in the user's dtype."""
        managed = self._params.managed
        if managed is None:
            return {}
        rows: dict[int, Tensor] = {}
        for p in managed.shards.pieces:
            whole = managed.assemble(p, managed.master(p))
            rows[id(p)] = self.rows(p, whole.to(self._params.dtypes[p]))
        return rows

    def _rows_of(self, p: Tensor) -> Tensor:
        return self.rows(p, private.gathered_copy(p) if self._params.stage3 else p.detach())

    def optimizer_state(self, state: dict[str, Any], known: Callable[[Any], State | None]) -> dict[str, Any]:
        """Returns ``optimizer.state_dict()`` in rows; ``known`` returns the ``State`` of those that are pieces."""

        def one(path: Any, tensor: Tensor) -> Tensor:
            found = known(tensor)
            if found is not None:
                return self.rows(found.parameter, self._params.attached.assemble(found.parameter, found.piece))
            return self._rows_of(tensor) if tensor in self._params.held else tensor

        return map_tensors(one, state)

    def states_as_rows(self, optimizers: Iterable[Optimizer], known: Callable[[Any], State | None]) -> None:
        """Replaces pieces in the states of ``optimizers`` by rows."""
        for p, entry in (each for o in optimizers for of_all in states(family(o)) for each in of_all.items()):
            for key, value in entry.items():
                if (found := known(value)) is not None:
                    entry[key] = self.rows(p, self._params.attached.assemble(p, found.piece))

    # -- full parameters -----------------------------------------------------------------------------------------

    def parameters(self) -> dict[Tensor, nn.Parameter]:
        """Returns full copies of the held parameters."""
        stage3 = self._params.stage3
        return {
            p: nn.Parameter(private.gathered_copy(p) if stage3 else p.detach().clone(), p.requires_grad)
            for p in self._params.held
        }

    def values_afterwards(self) -> dict[Tensor, Tensor]:
        """Returns full parameters on the CPU in the user's dtype and strides; read from the masters where DeepSpeed
        computed in another dtype."""
        params, managed = self._params, self._params.managed
        values: dict[Tensor, Tensor] = {}
        if managed is not None:
            in_another = [p for p in managed.shards.pieces if p.dtype != params.dtypes[p]]
            values = {p: managed.assemble(p, managed.master(p)) for p in in_another}
        whole: dict[Tensor, Tensor] = {}
        for p, shape in params.shapes.items():
            value = values.pop(p, None)
            if value is None:
                value = private.gathered_copy(p) if private.is_managed(p) else p.detach()
            whole[p] = torch.empty_strided(shape, params.strides[p], dtype=params.dtypes[p]).copy_(value)
        return whole
