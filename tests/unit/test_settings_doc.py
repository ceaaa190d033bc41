"""docs/settings.md is what `make settings` prints."""

from __future__ import annotations

from benchmarks import settings
from tests.helpers.ranks import ROOT

PAGE = ROOT / "docs" / "settings.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == settings.page(), "docs/settings.md is not what `make settings` prints"
