"""ZeRO stages 1, 2 and 3 for unchanged LightningModules: ``Trainer(strategy="zero3")``.

Importing this package registers the strategy names, before or after ``import lightning``. All heavier modules are
imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_zero.registry import register_when_imported
from lightning_zero.twins import unite_twins

if TYPE_CHECKING:
    from lightning_zero.app.check import check
    from lightning_zero.checkpoint.pretrained import load_pretrained
    from lightning_zero.checkpoint.store import load_checkpoint
    from lightning_zero.config import (
        ActivationCheckpointingConfig,
        CompileConfig,
        OffloadConfig,
        ZeroConfig,
    )
    from lightning_zero.planner import plan
    from lightning_zero.strategy import ZeroStrategy

__version__ = "0.1.0"
__all__ = [
    "ActivationCheckpointingConfig",
    "CompileConfig",
    "OffloadConfig",
    "ZeroConfig",
    "ZeroStrategy",
    "__version__",
    "check",
    "load_checkpoint",
    "load_pretrained",
    "plan",
]

# Name -> module, imported on first access: `import lightning_zero` must not import torch or Lightning.
_LAZY = {
    "ActivationCheckpointingConfig": "lightning_zero.config",
    "CompileConfig": "lightning_zero.config",
    "OffloadConfig": "lightning_zero.config",
    "ZeroConfig": "lightning_zero.config",
    "ZeroStrategy": "lightning_zero.strategy",
    "check": "lightning_zero.app.check",
    "load_checkpoint": "lightning_zero.checkpoint.store",
    "load_pretrained": "lightning_zero.checkpoint.pretrained",
    "plan": "lightning_zero.planner",
}

unite_twins()
register_when_imported()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
