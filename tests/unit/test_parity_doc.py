"""docs/parity.md has a row of everything that is compared, and each cell beyond the tolerance would have a reason."""

from __future__ import annotations

from benchmarks import models, parity
from tests.helpers.held_packages import PACKAGE_KINDS, PACKAGED
from tests.helpers.models import ROWS, TOLERANCE

PAGE = models.PAGE.read_text(encoding="utf-8")


def test_every_kind_has_its_row():
    assert PACKAGED.keys() == PACKAGE_KINDS.keys()
    rows = parity.kept_rows(PAGE)
    assert rows.keys() == parity.ALL.keys()
    assert {len(row) for row in rows.values()} == {1 + len(parity.ENGINES) * len(parity.STAGES)}
    assert not [name for name, cells in rows.items() if any("**" in cell for cell in cells)]


def test_every_model_has_its_row():
    lines = models.kept_lines(PAGE, ())
    assert [line.row.key for line in lines] == list(ROWS)
    assert {line.kind for line in lines} == {"equal", "refused"}
    assert not [key for key, row in ROWS.items() if (row.tolerance != TOLERANCE or row.mean_loss) and not row.reason]


def test_a_row_made_again_takes_the_place_of_the_one_before():
    old = next(line for line in models.kept_lines(PAGE, ()) if line.row.key == "torch/Adam")
    page = PAGE.replace(f"| torch | {old.version} | Adam | equal", "| torch | 0 | Adam | **1e-01**")
    (found,) = [line for line in models.kept_lines(page, ()) if line.row.key == "torch/Adam"]
    assert (found.version, found.cells) == ("0", ["**1e-01**", "equal", "equal"])
    without = "".join(line for line in PAGE.splitlines(keepends=True) if "| Adam |" not in line)
    assert "torch/Adam" not in {line.row.key for line in models.kept_lines(without, ())}
    assert "torch/Adam" in {line.row.key for line in models.kept_lines(without, {"torch/Adam"})}


def test_every_kind_has_a_row_in_groups_too() -> None:
    rows = parity.kept_rows(parity.GROUPS_PAGE.read_text(encoding="utf-8"))
    assert rows.keys() == parity.KINDS.keys()
