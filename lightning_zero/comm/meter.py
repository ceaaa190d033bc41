"""Counts traffic: calls, bytes and host seconds of the collectives that Python starts through ``torch.distributed``.

The tables below list how many bytes each function moves; all code that counts traffic uses them. The bytes sent are
those of :func:`wire_bytes`. Rings and direct exchanges send exactly that many; gloo's own
reduce-scatter may send more. Bytes that ranks on one host read from each other's memory count in the same way.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from lightning_zero.comm import direct
from lightning_zero.errors import MovedError
from lightning_zero.private.torch import TESTED


def wire_bytes(collective: str, nbytes: float, world_size: int) -> float:
    """Bytes that a rank sends, and receives, in a ``collective`` over ``nbytes`` (the full tensor, not a shard).

    This is the lower bound for any algorithm, and rings and pairwise exchanges reach it (ZeRO paper, section 7.1):
    (N-1)/N for an all-gather or a reduce-scatter, twice that for an all-reduce. In a broadcast the source only sends
    and the others only receive, ``nbytes`` each.
    """
    if world_size == 1:
        return 0.0
    share = (world_size - 1) / world_size
    return (
        nbytes * {"all_gather": share, "reduce_scatter": share, "all_reduce": 2 * share, "broadcast": 1.0}[collective]
    )


def _nbytes(tensors: Any) -> float:
    if isinstance(tensors, Tensor):
        return float(tensors.numel() * tensors.element_size())
    return sum(map(_nbytes, tensors)) if isinstance(tensors, Iterable) else 0.0


_EAGER: tuple[tuple[tuple[str, ...], str, tuple[str, ...], str], ...] = (
    # names of one function in different versions of torch, collective, its leading parameters in order, the one that
    # holds the full tensor
    (("all_gather_single", "all_gather_into_tensor"), "all_gather", ("output", "input", "group"), "output"),
    (("all_gather",), "all_gather", ("tensor_list", "tensor", "group"), "tensor_list"),
    (
        ("reduce_scatter_single", "reduce_scatter_tensor"),
        "reduce_scatter",
        ("output", "input", "op", "group"),
        "input",
    ),
    (("reduce_scatter",), "reduce_scatter", ("output", "input_list", "op", "group"), "input_list"),
    (("all_reduce",), "all_reduce", ("tensor", "op", "group"), "tensor"),
    (("broadcast",), "broadcast", ("tensor", "src", "group"), "tensor"),
    (
        ("all_to_all_single",),
        "all_to_all",
        ("output", "input", "output_split_sizes", "input_split_sizes", "group"),
        "input",
    ),
)
_DIRECT: dict[str, tuple[str, tuple[str, ...], str]] = {
    "all_gather": ("all_gather", ("output", "shard", "group"), "output"),
    "all_gather_each": ("all_gather", ("outputs", "shards", "group"), "outputs"),
    "reduce_scatter": ("reduce_scatter", ("output", "full", "group"), "full"),
}
"""Our own exchanges between CPU processes."""
_RENAMED = {"output_tensor": "output", "input_tensor": "input"}
"""Keywords that torch renamed, old name -> new name. Calls may use either."""


class TrafficMeter:
    """Counts the collectives of this process by kind, while it is installed; not those inside operators of ``DTensor``.

    A collective that calls another one counts once. The numbers only grow, so take differences.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        """Collective -> bytes sent by this rank."""
        self.seconds = 0.0
        """Time of the main thread inside collectives and their waits. On an accelerator both only queue work."""
        self._depth = threading.local()
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        """Replaces torch's functions by counting ones. A second call does nothing."""
        if self._undo:
            return
        for module in (dist, c10d):
            for names, kind, parameters, full in _EAGER:
                found = [name for name in names if hasattr(module, name)]
                if not found:  # the sums would silently lack its traffic
                    self.remove()
                    raise MovedError(
                        f"{module.__name__} has no {' and no '.join(names)} in torch {torch.__version__} (tested with"
                        f" torch{TESTED}), so traffic cannot be counted: use 'torch{TESTED}', or leave ZeroMonitor out."
                    )
                for name in found:
                    self._replace(module, name, kind, parameters, full)
        for name, (kind, parameters, full) in _DIRECT.items():
            self._replace(direct, name, kind, parameters, full)
        for work in (dist.Work, direct.Begun):
            self._replace(work, "wait")

    def remove(self) -> None:
        """Restores torch's functions, except those that other code has replaced meanwhile."""
        for module, name, original, counting in reversed(self._undo):
            if getattr(module, name) is counting:
                setattr(module, name, original)
        self._undo.clear()

    def _replace(
        self, module: Any, name: str, kind: str = "", parameters: tuple[str, ...] = (), full: str = ""
    ) -> None:
        """Replaces a function by one that counts it. Without ``full`` only its time counts."""
        original = getattr(module, name)
        # dist and c10d hold the same function and must get the same counting one, or a call would count twice.
        made = next((c for _, _, o, c in self._undo if o is original), None)
        counting = made or self._counting(original, kind, parameters, full)
        setattr(module, name, counting)
        self._undo.append((module, name, original, counting))

    def _counting(self, original: Any, kind: str, parameters: tuple[str, ...], full: str) -> Any:
        depth = self._depth

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(depth, "value", 0):
                return original(*args, **kwargs)
            depth.value, since = 1, time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                depth.value = 0
                if threading.current_thread() is threading.main_thread():
                    self.seconds += time.perf_counter() - since
                if full:
                    self._count(kind, dict(zip(parameters, args, strict=False)) | kwargs, full)

        return call

    def _count(self, kind: str, call: dict[str, Any], full: str) -> None:
        call = {_RENAMED.get(name, name): value for name, value in call.items()}
        n = dist.get_world_size(call.get("group"))
        self.calls[kind] += 1
        if n <= 1:
            return
        nbytes = _nbytes(call.get(full))
        if kind == "broadcast":
            is_source = call.get("src", call.get("group_src", 0)) == dist.get_rank()
            moved = nbytes if is_source else 0.0
        else:
            moved = nbytes * (n - 1) / n if kind == "all_to_all" else wire_bytes(kind, nbytes, n)
        self.sent[kind] += moved  # type: ignore[assignment]
