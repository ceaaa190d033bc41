"""Reading and putting back whole state: for checkpoints, for user code, and at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.engines.base import require_same_parameters, undetached_state_dict
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.lent_states import raw
from lightning_zero.engines.deepspeed.optimizer_step import Cut, parameters
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.steps import Steps

States = dict[Tensor, dict[str, Any]]
"""Of one optimizer, by parameter."""


class Whole:
    """Makes whole tensors of DeepSpeed's pieces.

    All methods are collective. None of them looks at what user code has written and no master knows of: the engine has
    that adopted before.
    """

    def __init__(self, params: Parameters, steps: Steps, mesh: DeviceMesh) -> None:
        self._params, self._steps, self._mesh = params, steps, mesh

    # -- rows, as checkpoints hold them --------------------------------------------------------------------------

    def rows(self, p: Tensor, whole: Tensor) -> DTensor:
        """This rank's rows of a whole tensor, as ``fully_shard`` would lay them out; a copy."""
        each = -(-whole.shape[0] // self._mesh.size())
        first = min(each * self._mesh.get_rank(), whole.shape[0])
        mine = whole.narrow(0, first, min(each, whole.shape[0] - first)).clone()
        return DTensor.from_local(
            mine, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def state_dict(self) -> dict[str, Any]:
        """The module's, of rows; a tied parameter is one object under all its names."""
        state = undetached_state_dict(self._params.module)
        done = self.rows_of_masters()

        def one(path: Any, tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = self._rows_of(tensor) if tensor in self._params.held else tensor.detach()
            return done[id(tensor)]

        return map_tensors(one, state)

    def rows_of_masters(self) -> dict[int, Tensor]:
        """By the parameter's identity, in its own dtype."""
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

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()``, of rows."""
        rows = self.rows_of_states(optimizer)
        before = optimizer.state
        try:
            optimizer.state = {**raw(before), **rows}  # type: ignore[assignment]
            return type(optimizer).state_dict(optimizer)  # the class's: its own object has what users see
        finally:
            optimizer.state = before

    def rows_of_states(self, optimizer: Optimizer, whole: bool = False) -> States:
        """Its states, as this rank's rows or ``whole`` on the CPU."""
        managed, step = self._params.attached, self._steps.of(optimizer)
        step.take_given()

        def laid_out(p: Tensor, value: Any) -> Any:
            if type(value) is not Cut:
                return value
            assembled = managed.assemble(p, value.piece)
            return assembled.cpu() if whole else self.rows(p, assembled)

        return {
            p: {key: laid_out(p, value) for key, value in step.states[p].items()}
            for p in parameters(optimizer)
            if p in step.states
        }

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Loads a whole state, of which this rank keeps its pieces."""
        managed = self._params.attached
        params = require_same_parameters(optimizer, state)
        step = self._steps.of(optimizer)
        odd = {i: values for i, values in state["state"].items() if params[i] not in managed}
        optimizer.load_state_dict({**state, "state": odd})
        step.take_given()
        whole = {params[i]: values for i, values in state["state"].items() if params[i] in managed}
        step.put_states(whole, casts=True)

    # -- whole parameters ----------------------------------------------------------------------------------------

    def parameters(self) -> dict[Tensor, nn.Parameter]:
        """Copies of the held ones."""
        stage3 = self._params.stage3
        return {
            p: nn.Parameter(private.gathered_copy(p) if stage3 else p.detach().clone(), p.requires_grad)
            for p in self._params.held
        }

    def values_afterwards(self) -> dict[Tensor, Tensor]:
        """Whole parameters on the CPU, of their own dtype and strides; masters where DeepSpeed computed in another."""
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
