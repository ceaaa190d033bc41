"""Dtypes of parameters, reductions and master weights for each precision, and Lightning's plugins on shards.

| ``Trainer(precision=...)`` | stored (master) weights | gathered for compute | gradients reduced in | autocast |
|---|---|---|---|---|
| ``32-true`` | fp32 | fp32 | fp32 | – |
| ``64-true`` | fp64 | fp64 | fp64 | – |
| ``bf16-true`` / ``16-true`` | bf16 / fp16 | bf16 / fp16 | bf16 / fp16 | – |
| ``bf16-mixed`` / ``16-mixed`` | fp32 | bf16 / fp16 | fp32 | bf16 / fp16 |

The setting ``reduce_dtype`` replaces the column of reductions.

Lightning chooses its precision plugin by ``isinstance`` on its own strategies. :func:`adapt_precision` replaces that
plugin by this package's counterpart, which clips, unscales and steps on shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_zero.private.lightning import after_closure
from lightning_zero.private.torch import found_inf, loss_scale, set_found_inf

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_zero.engines.base import Engine


@dataclass(frozen=True)
class DtypePolicy:
    """Dtypes of compute and communication; ``None`` means the parameter's dtype."""

    param_dtype: torch.dtype | None = None
    """Dtype in which parameters are gathered and used in compute."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are reduced."""

    @property
    def is_mixed(self) -> bool:
        return self.param_dtype is not None


REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of the setting ``reduce_dtype``."""


class _OnShards(Precision):
    """Clips and steps through the engine as soon as the strategy has set one."""

    engine: Engine | None = None

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.engine is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        return self.engine.step(optimizer, partial(self._run_closure, model, optimizer, closure), **kwargs)

    def _run_closure(self, model: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
        result = closure()
        if self.engine is not None:
            self.engine.reshard()  # a step that returned None has left its units gathered
        after_closure(self, model, optimizer)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.engine.clip_grad_norm(optimizer, float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.engine.clip_grad_value(optimizer, float(clip_val))

    def dtype_policy(self) -> DtypePolicy:
        """Dtypes in which the engine gathers and reduces."""
        return DtypePolicy()


class ZeroPrecision(_OnShards):
    """``32-true``."""


class ZeroHalfPrecision(_OnShards, HalfPrecision):
    """``bf16-true`` and ``16-true``."""


class ZeroDoublePrecision(_OnShards, DoublePrecision):
    """``64-true``."""


class ZeroMixedPrecision(_OnShards, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``: fp32 master weights, loss scaling for fp16.

    An overflow on one rank makes every rank skip its step, because unscaling reduces ``found_inf`` over all ranks.
    """

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None or self.engine is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("precision='16-mixed' with LBFGS: its inner steps cannot be scaled; use 'bf16-mixed'.")
        result = closure()
        self.engine.reshard()
        skip = result is None and model.automatic_optimization  # no backward ran, nothing to unscale
        if not skip:  # before after_closure, which clips and runs hooks that expect unscaled gradients
            self.unscale(optimizer)
        after_closure(self, model, optimizer)
        if skip:
            return result
        with self.engine.stepping(optimizer):
            self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides this rank's gradient shards by the loss scale; an overflow on one rank is recorded on all ranks."""
        assert self.scaler is not None
        assert self.engine is not None
        with self.engine.on_shards(optimizer):
            self.scaler.unscale_(optimizer)
        found = found_inf(self.scaler, optimizer)
        for flag in found.values():
            self.engine.any_rank(flag)
        scale = loss_scale(self.scaler)
        if scale is not None and scale.device.type == "cpu":
            # The scaler would copy the flags to the host asynchronously, and the CPU could read them too early.
            on_host = {device: flag.to(scale.device) for device, flag in found.items()}
            set_found_inf(self.scaler, optimizer, on_host)

    def scale_on_host(self) -> None:
        """Creates the loss scale in host memory, for gradients there: unscaling then never waits for the device.

        By default the scaler creates the scale on the device of the first loss and copies it to the host
        asynchronously, so CPU kernels could read it too early. Copies from host to device are ordered by the stream.
        """
        if self.scaler is not None and loss_scale(self.scaler) is None:
            self.scaler.scale(torch.zeros((), device="cpu"))  # creates the scale where its argument is

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict: Lightning would store the scaler under this class's name, which DDP does not know. See
        :meth:`on_save_checkpoint`."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint[MixedPrecision.__qualname__] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if MixedPrecision.__qualname__ in checkpoint:
            self.load_state_dict(checkpoint[MixedPrecision.__qualname__])

    def dtype_policy(self) -> DtypePolicy:
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return DtypePolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def adapt_precision(plugin: Precision | None) -> Precision | None:
    """Returns this package's counterpart of Lightning's ``plugin``.

    Raises:
        ValueError: For any other class of plugin, whose ways to step or clip are unknown.
    """
    if plugin is None or isinstance(plugin, _OnShards):
        return plugin
    if type(plugin) is Precision:
        return ZeroPrecision()
    if type(plugin) is DoublePrecision:
        return ZeroDoublePrecision()
    if type(plugin) is HalfPrecision:
        return ZeroHalfPrecision(plugin.precision)
    if type(plugin) is MixedPrecision:
        return ZeroMixedPrecision(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[arg-type]
    raise ValueError(
        f"precision plugin {type(plugin).__name__} is not known to work on shards: use precision='32-true', '64-true',"
        " 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'."
    )
