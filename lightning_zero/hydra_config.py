"""Builds the Trainer, the module and the data from the ``cfg`` of a user's own Hydra app.

This is the public name of :mod:`lightning_zero.app.hydra_config`.
"""

from lightning_zero.app.hydra_config import make_object, make_strategy, make_trainer, register_configs

__all__ = ["make_object", "make_strategy", "make_trainer", "register_configs"]
