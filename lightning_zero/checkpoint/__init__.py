"""Checkpoints that belong to the module, not to the strategy.

Two forms of the same content: one *file*, which is Lightning's own, and a *sharded* directory, which each rank writes
its part of. ``layout`` says what is where, ``lazy`` how a tensor on disk looks like one in memory, ``file`` and
``directory`` write and read the forms, ``convert`` turns one into the other.
"""

FORMATS = ("file", "sharded", "safetensors")
"""What ``lightning-zero convert`` writes; here, so that the command line can be read without PyTorch."""
