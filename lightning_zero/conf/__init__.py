"""Hydra groups, available to any app with ``hydra.searchpath: [pkg://lightning_zero.conf]``.

Hydra imports this package to find its files. The import registers the schemas that the files refer to.
"""

from lightning_zero.app.hydra_config import register_configs

register_configs()
