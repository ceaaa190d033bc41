"""Private names of other libraries, one file per library; the rest of the package uses only public names.

The private names of ``fully_shard`` and DeepSpeed are with their engines: ``engines/fsdp2/private.py`` and
``engines/deepspeed/private.py``. Each file states why a name is needed, in which versions it was read, and why no
public name will do. Its table lists what must exist (:mod:`lightning_zero.private.check`).
"""
