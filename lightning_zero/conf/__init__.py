"""Hydra groups: ``hydra.searchpath: [pkg://lightning_zero.conf]`` makes them any app's own.

Hydra imports this package to find its files; that is when the schemas they refer to are registered.
"""

from lightning_zero.app.hydra_config import register_configs

register_configs()
