"""Defines a tensor on disk that looks like one in memory.

Each operation reads the values again, and only the rows that it needs. So copying a :class:`LazyTensor` into a
parameter needs memory for one tensor; copying a slice of its rows needs memory for those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.private.torch import disabled_torch_function, pytree, schema_of, wrapper_subclass

Read = Callable[[int, int], Tensor]
"""``read(start, stop)`` returns rows ``start`` to ``stop`` of dim 0 as a new CPU tensor; (0, 0) for a 0-dim tensor."""


class LazyTensor(Tensor):
    """Reads its values through ``read``; see the module's docstring. It is read-only: an in-place operation raises."""

    read_rows: Read
    start: int

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, read: Read, start: int = 0) -> LazyTensor:
        tensor: Any = wrapper_subclass(cls, torch.Size(shape), dtype, torch.device("cpu"))
        tensor.read_rows, tensor.start = read, start
        return tensor

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def materialize(self) -> Tensor:
        """Returns the values in a new plain tensor."""
        return self.read_rows(self.start, self.start + self.shape[0]) if self.dim() else self.read_rows(0, 0)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return memo.setdefault(id(self), self.materialize())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.slice.Tensor and (rows := _rows(*args, **(kwargs or {}))) is not None:
            tensor, start, stop = rows
            return cls((stop - start, *tensor.shape[1:]), tensor.dtype, tensor.read_rows, tensor.start + start)
        given = {**dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)), **(kwargs or {})}
        written = [a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write]
        if any(isinstance(t, LazyTensor) for t in pytree.tree_leaves([given.get(name) for name in written])):
            raise RuntimeError(
                f"{func} on a checkpoint's tensor, which is read-only on disk: put a new tensor into the dictionary"
                " instead, as in checkpoint['state_dict'][name] = checkpoint['state_dict'][name] * 2."
            )
        return func(*_materialized(args), **{key: _materialized([v])[0] for key, v in (kwargs or {}).items()})


def _rows(
    tensor: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[LazyTensor, int, int] | None:
    """Returns the tensor and the first and last row of the slice, if it consists of consecutive rows; else ``None``."""
    if dim != 0 or step != 1:
        return None
    first, last, _ = slice(start, end).indices(tensor.shape[0])
    return tensor, first, max(first, last)


def _materialized(values: Sequence[Any]) -> list[Any]:
    def one(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return value.materialize()
        return type(value)(map(one, value)) if type(value) in (list, tuple) else value

    return [one(value) for value in values]
