"""Entry point for a Hydra app of one's own: builds the Trainer, the module and the data of its ``cfg``.

The public name of what :mod:`lightning_zero.app.hydra_config` holds.
"""

from lightning_zero.app.hydra_config import make_object, make_strategy, make_trainer, register_configs

__all__ = ["make_object", "make_strategy", "make_trainer", "register_configs"]
