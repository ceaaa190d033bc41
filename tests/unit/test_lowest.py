"""``make test-lowest`` installs the lower bounds of ``pyproject.toml``, all of them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.helpers.ranks import ROOT


def test_the_lowest_versions_are_the_bounds() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = [re.match(r"([\w-]+)>=([\d.]+),<", requirement) for requirement in requirements]
    assert None not in bounds, requirements  # each has both bounds
    recipe = (ROOT / "Makefile").read_text().split("\ntest-lowest:")[1].split("\n\n")[0]
    (command,) = re.findall(r"^\t(sed .* pyproject\.toml) > \$\(LOWEST\)/lowest\.txt$", recipe, re.MULTILINE)
    found = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [f"{bound.group(1)}=={bound.group(2)}" for bound in bounds if bound]
    assert "-r $(LOWEST)/lowest.txt" in recipe
