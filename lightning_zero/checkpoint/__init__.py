"""Checkpoints that belong to the module, not to the strategy.

The same content has two forms: one *file*, Lightning's own, and a *sharded* directory, to which each rank writes its
shards. ``layout`` describes both, ``lazy`` makes a tensor on disk look like one in memory, ``file`` and ``directory``
write and read one form each, ``store`` does so for all ranks together, and ``convert`` turns one form into the other.
"""

FORMATS = ("file", "sharded", "safetensors")
"""Forms that ``lightning-zero convert`` writes. Defined here so that parsing the command line does not import
PyTorch."""
