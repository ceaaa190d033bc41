"""The check at the start of a run: it names what moved, the version found and those that were tested."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from lightning_zero.errors import MovedError
from lightning_zero.private import check as checking
from lightning_zero.private.check import Library, check


def a_function(a: Any, *, b: Any = 1) -> None: ...


class AClass:
    def __init__(self) -> None:
        self._made_here = 1

    @property
    def there(self) -> int:
        return self._looked_up  # type: ignore[attr-defined]


def _wrapped(function: Any) -> Any:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return wrapped


class Patched:  # as Dynamo patches nn.Module
    __init__ = _wrapped(AClass.__init__)


HERE = __name__


@pytest.mark.parametrize(
    ("home", "names"),
    [
        (HERE, "AClass.there.fget a_function"),
        (f"{HERE}:AClass", "_made_here _looked_up there"),
        (f"{HERE}:Patched.__init__", "_made_here"),
        (f"{HERE}:a_function", "b"),
    ],
)
def test_what_is_there(home: str, names: str) -> None:
    check(Library("pytest", ">=8", {home: names}))


@pytest.mark.parametrize(
    ("home", "names", "text"),
    [
        ("nobody.has.this", "name", "nobody.has.this is gone"),
        (f"{HERE}:Nothing", "name", "Nothing is gone"),
        (HERE, "AClass.other.fget", r"AClass\.other\.fget is gone"),
        (f"{HERE}:AClass", "there _other", r"AClass\._other is gone"),
        (f"{HERE}:a_function", "c", r"a_function\.c is gone"),
    ],
)
def test_what_moved(home: str, names: str, text: str) -> None:
    with pytest.raises(MovedError, match=text):
        check(Library("pytest", ">=8", {home: names}))


@pytest.mark.parametrize(
    ("found", "rank", "lines"),
    [("2.7.3", "0", 0), ("2.8.0", "0", 1), ("2.10.0+cu130", "0", 1), ("3.0.0.dev1", "0", 1), ("2.8.0", "1", 0)],
)
def test_a_newer_version_is_named_once(monkeypatch, caplog, found: str, rank: str, lines: int) -> None:
    """Where all parts are there."""
    monkeypatch.setattr(checking, "version", lambda name: found)
    monkeypatch.setattr(checking, "_checked", set())
    monkeypatch.setenv("LOCAL_RANK", rank)
    library = Library("lightning", ">=2.6,<2.8", {HERE: "AClass"})
    for _ in range(2):
        check(library)
    assert len(caplog.messages) == lines
    assert all(f"lightning {found} is newer than lightning>=2.6,<2.8" in text for text in caplog.messages)


def test_deepspeeds_parts_are_there_on_an_accelerator() -> None:
    """DeepSpeed imports other modules for it than on the CPU."""
    program = "from lightning_zero.engines.deepspeed import private as p; p.check(p.DEEPSPEED)"
    env = {**os.environ, "DS_ACCELERATOR": "cuda", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_strategy_is_checked_when_it_is_made(monkeypatch) -> None:
    from lightning_zero import strategy

    gone = Library("torch", ">=2.11,<2.16", {"torch:Tensor": "_nowhere"})
    monkeypatch.setattr(strategy, "TORCH", gone)
    with pytest.raises(MovedError, match=r"Tensor\._nowhere is gone"):
        strategy.ZeroStrategy(stage=2)
