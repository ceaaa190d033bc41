"""``make test-lowest`` and ``make models`` install what ``pyproject.toml`` says."""

from __future__ import annotations

import re
import subprocess

import pytest
from packaging.requirements import Requirement

from benchmarks.models import requirements
from tests.helpers.ranks import ROOT


def test_the_lowest_versions_are_the_bounds() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = [re.match(r"([\w-]+)>=([\d.]+),<", requirement) for requirement in wanted]
    assert None not in bounds, wanted  # each has both bounds
    recipe = (ROOT / "Makefile").read_text().split("\ntest-lowest:")[1].split("\n\n")[0]
    (command,) = re.findall(r"^\t(sed .* pyproject\.toml) > \$\(LOWEST\)/lowest\.txt$", recipe, re.MULTILINE)
    found = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [f"{bound.group(1)}=={bound.group(2)}" for bound in bounds if bound]
    assert "-r $(LOWEST)/lowest.txt" in recipe


@pytest.mark.parametrize("extra", ["models", "models-needed"])
def test_pip_understands_each_word_of_an_extra(extra: str) -> None:
    """The words of a shell's ``$(...)`` keep their quotes."""
    words = " ".join(requirements(extra)).split()
    assert len({Requirement(word).name for word in words}) == len(words) > 3
