"""docs/settings.md is what `make settings` prints, and it explains every setting and every choice."""

from __future__ import annotations

import dataclasses

from benchmarks import settings
from tests.helpers.ranks import ROOT

PAGE = ROOT / "docs" / "settings.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == settings.page(), "docs/settings.md is not what `make settings` prints"


def test_every_setting_has_its_line_and_a_meaning():
    unexplained = [
        f"{cls.__name__}.{f.name}"
        for cls, _, _ in settings.PAGES
        for f, meaning in settings.documented(cls)
        if not meaning and f.name not in ("job_name", "partition", "account")
    ]
    assert not unexplained
    text = PAGE.read_text(encoding="utf-8")
    for cls, _, _ in settings.PAGES:
        assert all(f"| `{f.name}` |" in text for f in dataclasses.fields(cls))


def test_roles_become_markdown():
    assert settings.markdown("``a``, :class:`~x.B` and\n    :attr:`c`") == "`a`, `x.B` and `c`"
