"""What torch functions do to their arguments, as far as their names tell; both engines' views go by it."""

from __future__ import annotations

_SPECIAL_IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"))


def is_in_place(name: str) -> bool:
    """Whether the torch function called ``name`` writes to its first argument."""
    return name in _SPECIAL_IN_PLACE or (name.endswith("_") and not name.endswith("__"))
