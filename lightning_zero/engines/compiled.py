"""The setting ``compile="units"``: compiles the forward of each shard unit, like a call of ``block.compile()``.

Only the unit's ``forward`` is compiled. Its hooks, including those of ``fully_shard`` and of this package, run once
around it, so a unit whose forward cannot be compiled runs uncompiled. Copies and pickles of a unit are ordinary
modules, because the only attribute set here is one that torch itself leaves out of them.
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
from lightning_zero.private.torch import (
    call_with_hooks,
    compiled_call,
    dynamo_error,
    is_traced,
    set_compiled_call,
)

_log = logging.getLogger(__name__)


class CompiledUnits:
    """Compiles units at their first call, until :meth:`undo`. Units that the user has compiled are left alone.

    Args:
        units: Names and modules, without the root's.
        recomputed: Modules with activation checkpointing. For these the recomputing forward is compiled.

    Raises:
        ValueError: If ``torch.compile`` does not know the backend.
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
        """The compiled units."""
        return [unit for _, unit in self._units]

    def undo(self) -> None:
        """Restores the units' uncompiled calls."""
        for _, unit in self._units:
            set_compiled_call(unit, None)


def _compiled(name: str, unit: nn.Module, config: CompileConfig, recomputed: Recomputed) -> Callable[..., Any]:
    plain = recomputed.forward_of(unit)  # equal blocks share its code, and so the compiled graphs
    compiled = torch.compile(
        plain,
        backend=config.backend or "inductor",
        mode=config.mode,
        dynamic=config.dynamic,
        fullgraph=config.fullgraph,
    )
    works, is_first, uncompilable = True, True, dynamo_error()

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal works, is_first
        if works:
            try:
                output = compiled(*args, **kwargs)
            except uncompilable as error:
                works = False
                _warn(name, _first_line(error))
            else:
                if is_first and not is_traced(plain):  # Dynamo raises no error when it skips a frame
                    _warn(name, _GIVEN_UP)
                is_first = False
                return output
        return plain(*args, **kwargs)

    outermost = recomputed.offloading(forward) if unit in recomputed else forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_with_hooks(unit, outermost, *args, **kwargs)

    return call


_GIVEN_UP = (
    "Dynamo runs its forward in eager mode, for example because of a graph break inside a loop or a try statement."
    " TORCH_LOGS=graph_breaks shows where."
)


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"


def _warn(name: str, why: str) -> None:
    if dist.get_rank() == 0:
        _log.warning("compile='units': %r runs uncompiled: %s", name, why)
