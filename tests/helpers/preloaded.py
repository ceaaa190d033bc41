"""Imported once, by the process that ranks and commands are forked from: what takes seconds and starts no thread."""

from __future__ import annotations

import contextlib
import gc
import os
from importlib import import_module

import torch

import lightning_zero

with open(os.devnull, "wb") as nothing:
    os.dup2(nothing.fileno(), 1)  # deepspeed writes a line, and benchmarks print pages there; forks have their own
lightning_zero.ZeroStrategy  # noqa: B018  (imports the strategy, Lightning and torch with it)
for name in ("lightning_zero.engines.fsdp2.engine", "lightning_zero.app.cli", "lightning_zero.app.hydra_config"):
    import_module(name)
if torch.version.cuda is None:  # deepspeed looks for devices, after which CUDA could not be used in a fork
    with contextlib.suppress(ImportError):
        for name in ("deepspeed.runtime.engine", "torch._inductor.compile_fx"):  # with its first run
            import_module(name)
import_module("torch._decomp.decompositions_for_jvp")  # compiles them, with the first torch.func.jvp
import_module("tests.helpers.zoo")
torch.set_num_threads(1)
gc.freeze()  # the collection after each job need not walk through torch
