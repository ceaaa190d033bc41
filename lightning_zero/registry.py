"""The names that ``Trainer(strategy=...)`` takes once this package is imported."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

NAMES: dict[str, dict[str, Any]] = {
    f"zero{stage}{offloaded}{suffix}": {"stage": stage, "engine": engine, **offload}
    for suffix, engine in (("", "fsdp2"), ("_deepspeed", "deepspeed"))
    for offloaded, offload in (("", {}), ("_offload", {"offload": "cpu"}))
    for stage in (1, 2, 3)
}
NAMES["zero3_nvme"] = {"stage": 3, "engine": "deepspeed", "offload": "nvme"}
NAMES["zero_auto"] = {"auto": True, "engine": "fsdp2"}
"""Registered name -> the fields of ``ZeroConfig`` it stands for."""


def register_strategies() -> None:
    """Registers every name; safe to call again (Lightning has no entry point for strategies)."""
    for name, settings in NAMES.items():
        StrategyRegistry.register(
            name,
            _make_strategy,  # the class is imported on first use, not with the package
            description="ZeRO " + ", ".join(f"{key} {value}" for key, value in settings.items()),
            override=True,
            **settings,
        )


def _make_strategy(**settings: Any) -> Any:
    from lightning_zero.auto import make_strategy
    from lightning_zero.config import ZeroConfig

    return make_strategy(ZeroConfig.from_kwargs(**settings))
