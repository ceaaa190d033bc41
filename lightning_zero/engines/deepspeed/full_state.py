"""Reads state from DeepSpeed's pieces: for checkpoints, user code, reports of memory, and at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_zero.checkpoint.later import Value
from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.shards import as_shard, local
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.after_run import LeftState, entries, leave_parameter
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.model_state import ModelState, states_of
from lightning_zero.engines.residency import States


class FullState:
    """Assembles full tensors from DeepSpeed's pieces.

    All methods but the last are collective. They read masters, so the engine must store user code's writes to
    parameters before (``DeepSpeedEngine.settle``).
    """

    def __init__(self, params: Parameters, states: States, mesh: DeviceMesh) -> None:
        self._params, self._states, self._mesh = params, states, mesh

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

    def in_rows(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replaces parameters and sharded optimizer states in ``state`` by their rows; a tied tensor stays one object
        under all its names."""
        done: dict[int, Tensor] = {}

        def one(path: Any, tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                assembly = self._states.part_of(tensor)
                if assembly is None and tensor in self._params.held:
                    assembly = partial(private.gathered_copy, tensor)
                done[id(tensor)] = tensor.detach() if assembly is None else self.rows(assembly())
            return done[id(tensor)]

        return map_tensors(one, state)

    # -- after the run -------------------------------------------------------------------------------------------

    def leave_states(self, optimizers: Iterable[Optimizer], failed: bool) -> None:
        """Leaves rows in the states of ``optimizers`` (collective); after a run that ``failed`` as for parameters."""
        left = LeftState.of if failed else lambda assembly, full: self.rows(assembly())
        self._states.end(entries(optimizers), left)

    def leave_parameters(self, failed: bool) -> None:
        """Leaves this rank's rows of stage-3 parameters, on the CPU (collective). After a run that ``failed`` other
        ranks may be gone: then user code that touches a parameter assembles it from all ranks' shards."""
        for p in cast("Iterable[nn.Parameter]", self._params.held):
            left: Value = private.assembly(p)
            if not failed:
                rows = self.rows(private.gathered_copy(p))
                left = as_shard(local(rows).cpu(), rows) if isinstance(rows, DTensor) else rows.cpu()
            leave_parameter(p, left, p)

    # -- reports -------------------------------------------------------------------------------------------------

    def model_state(self, optimizers: Iterable[Optimizer], config: ZeroConfig) -> ModelState:
        """Counts the bytes on this rank, by kind and place; not collective.

        DeepSpeed computes with one set of tensors and steps another, so *parameters* are the module's (stage 3: this
        rank's shards and all that is gathered) plus the masters. *Gradients* are averaged pieces, in buffers of their
        own.
        """
        state, shards, on_cpu = ModelState(), self._params.shards, self._mesh.device_type == "cpu"

        def here(kind: str, tensor: Tensor, moves: bool = False) -> None:
            """Without an accelerator, a tensor that offload ``moves`` counts as host memory."""
            on_host = moves if on_cpu else tensor.device.type == "cpu"
            state.add_bytes(kind, tensor.nbytes, "host" if on_host else "device")

        for p in self._params.named.values():
            if not private.is_partitioned(p):
                here("parameters", p)
            if (cut := private.cut_of(p)) is not None:
                here("parameters", cut, config.offloads_parameters)
        if shards is not None:
            for flat in shards.masters:
                here("parameters", flat, config.offloads_optimizer)
            for flat in shards.grads.values():
                here("gradients", flat, config.offloads_optimizer)
        for _, value in states_of(optimizers):
            assembly = self._states.part_of(value)
            here("optimizer", value if assembly is None else assembly.part, config.offloads_optimizer)
        return state
