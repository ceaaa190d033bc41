"""Checkpoints that belong to the module, not to the strategy.

The same content has two forms: one *file*, Lightning's own, and a *sharded* directory, to which each rank writes its
shards. ``layout`` describes both, ``lazy`` makes a tensor on disk look like one in memory, ``file`` and ``directory``
write and read one form each, ``store`` does it for all ranks together, ``convert`` turns one form into the other.
"""

FORMATS = ("file", "sharded", "safetensors")
"""Forms that ``lightning-zero convert`` writes; here, so that the command line is parsed without importing PyTorch."""
