"""The check at the start of a run: it names what moved, the version found and those that were tested."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zero.errors import MovedError
from lightning_zero.private import check as checking
from lightning_zero.private.check import Library, Needed, check


def a_function(a: Any, b: Any, *, c: Any = 1, d: Any = 2) -> None: ...


class AClass:
    def __init__(self) -> None:
        self._made_here = 1

    @property
    def there(self) -> int:
        return self._looked_up  # type: ignore[attr-defined]

    @property
    def settable(self) -> int:
        return 0

    @settable.setter
    def settable(self, value: int) -> None: ...


def _wrapped(function: Any) -> Any:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return wrapped


class Patched:  # as Dynamo patches nn.Module
    __init__ = _wrapped(AClass.__init__)


HERE = __name__


@pytest.mark.parametrize(
    "needed",
    [
        Needed(f"{HERE}:a_function", takes="a, b, *d"),
        Needed(f"{HERE}:AClass", stores="_made_here _looked_up there"),
        Needed(f"{HERE}:AClass", sets="settable _made_here"),
        Needed(f"{HERE}:Patched.__init__", stores="_made_here"),
    ],
)
def test_what_is_there(needed: Needed) -> None:
    check(Library("pytest", ">=8", (needed,)))


@pytest.mark.parametrize(
    ("needed", "text"),
    [
        (Needed("nobody.has.this:name"), "nobody.has.this is gone"),
        (Needed(f"{HERE}:AClass.there.fset"), r"there\.fset is gone"),
        (Needed(f"{HERE}:a_function", takes="b, a"), r"takes \(a, b, c, d\) instead of \(b, a\)"),
        (Needed(f"{HERE}:a_function", takes="a"), "instead of"),  # b would be missing
        (Needed(f"{HERE}:AClass", stores="_other"), "no longer has _other"),
        (Needed(f"{HERE}:AClass", stores="there", sets="there"), r"AClass\.there is read-only"),
    ],
)
def test_what_moved(needed: Needed, text: str) -> None:
    with pytest.raises(MovedError, match=text):
        check(Library("pytest", ">=8", (needed,)))


@pytest.mark.parametrize(
    ("found", "rank", "lines"),
    [("2.7.3", "0", 0), ("2.8.0", "0", 1), ("2.10.0+cu130", "0", 1), ("3.0.0.dev1", "0", 1), ("2.8.0", "1", 0)],
)
def test_a_newer_version_is_named_once(monkeypatch, caplog, found: str, rank: str, lines: int) -> None:
    """Where all parts are there."""
    monkeypatch.setattr(checking, "version", lambda name: found)
    monkeypatch.setattr(checking, "_checked", set())
    monkeypatch.setenv("LOCAL_RANK", rank)
    for _ in range(2):
        check(Library("lightning", ">=2.6,<2.8", (Needed(f"{HERE}:AClass"),)))
    assert len(caplog.messages) == lines
    assert all(f"lightning {found} is newer than lightning>=2.6,<2.8" in text for text in caplog.messages)


def test_a_strategy_is_checked_when_it_is_made(monkeypatch) -> None:
    from lightning_zero import strategy

    gone = Library("torch", ">=2.11,<2.16", (Needed("torch:Tensor._nowhere"),))
    monkeypatch.setattr(strategy, "TORCH", gone)
    with pytest.raises(MovedError, match=r"Tensor\._nowhere is gone"):
        strategy.ZeroStrategy(stage=2)
