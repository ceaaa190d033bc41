"""Private names of other libraries, one file per library; the rest of the package knows their public names only.

``fully_shard`` and DeepSpeed have theirs beside their engines: ``engines/fsdp2/private.py``,
``engines/deepspeed/private.py``. Each file says why a name is needed, in which versions it was read and which public
name replaces it, and has a table of what must be there (:mod:`lightning_zero.private.check`).
"""
