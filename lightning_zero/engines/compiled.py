"""The setting ``compile="units"``: ``torch.compile`` for the forward of each shard unit, as one would do by hand with
``block.compile()``.

What is compiled is the unit's ``forward`` alone. Its hooks, ``fully_shard``'s and ours among them, run around it once,
so that a unit whose forward turns out not to be compilable can go on without. Copies and pickles of a unit are of an
ordinary module: nothing but the attribute is set that torch itself leaves out of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.config import CompileConfig
from lightning_zero.engines.recompute import Recomputed
from lightning_zero.private.torch import call_with_hooks, compiled_call, dynamo_error, set_compiled_call

_log = logging.getLogger(__name__)


class CompiledUnits:
    """Units that are compiled at their first call, until :meth:`undo`; those that the user has compiled are left alone.

    Args:
        units: Names and modules, not the root's.
        recomputed: Of those among them that recompute, the recomputing forward is compiled.

    Raises:
        ValueError: For a backend that torch does not know.
    """

    def __init__(self, config: CompileConfig, units: Iterable[tuple[str, nn.Module]], recomputed: Recomputed) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if config.backend is not None and config.backend not in known:
            raise ValueError(
                f"compile.backend={config.backend!r}: torch.compile knows {', '.join(sorted(known))}; use one of them,"
                " or None for 'inductor'."
            )
        self._units = [(name, unit) for name, unit in units if compiled_call(unit) is None]
        for name, unit in self._units:
            set_compiled_call(unit, _compiled(name, unit, config, recomputed))

    @property
    def modules(self) -> list[nn.Module]:
        """Those that are compiled."""
        return [unit for _, unit in self._units]

    def undo(self) -> None:
        """The units are called as they were before."""
        for _, unit in self._units:
            set_compiled_call(unit, None)


def _compiled(name: str, unit: nn.Module, config: CompileConfig, recomputed: Recomputed) -> Callable[..., Any]:
    plain = recomputed.forward_of(unit)  # equal blocks share its code, and so what was compiled
    compiled = torch.compile(
        plain,
        backend=config.backend or "inductor",
        mode=config.mode,
        dynamic=config.dynamic,
        fullgraph=config.fullgraph,
    )
    works, uncompilable = True, dynamo_error()

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal works
        if works:
            try:
                return compiled(*args, **kwargs)
            except uncompilable as error:
                works = False
                if dist.get_rank() == 0:
                    _log.warning("%s", _why_not(name, error))
        return plain(*args, **kwargs)

    outermost = recomputed.offloading(forward) if unit in recomputed else forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_with_hooks(unit, outermost, *args, **kwargs)

    return call


def _why_not(name: str, error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"compile='units': {name!r} is not compiled and runs as it is: {type(error).__name__}: {first}"
