"""The chart of a plan shows what the text recommends, on a scale that DDP's bar does not set."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zero.planner.memory import KINDS
from lightning_zero.planner.rows import Plan, Row

GIB = 2**30
matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


def a_row(name: str, stage: int, peak_gib: float, checkpointed_gib: float) -> Row:
    """All of its peak are activations, which recomputation lowers."""
    zero = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered_unit", "activations"), 0.0)
    zero |= dict.fromkeys(("activations_checkpointed", "host", "host_checkpointed", "disk"), 0.0)
    zero |= dict.fromkeys(("sent_total", "pcie", "disk_traffic"), 0.0)
    parts = [{**dict.fromkeys(KINDS, 0.0), "activations": gib * GIB} for gib in (peak_gib, checkpointed_gib)]
    more: dict[str, Any] = {"sent": {}, "max_micro_batch": 0, "max_micro_batch_checkpointed": 1}
    return Row(
        **{**zero, **more},
        name=name,
        stage=stage,
        offload="none",
        at_peak=parts[0],
        peak=peak_gib * GIB,
        at_peak_checkpointed=parts[1],
        peak_checkpointed=checkpointed_gib * GIB,
        fits=False,
        fits_checkpointed=checkpointed_gib < 72,
    )


def a_plan(device_gib: float | None) -> Plan:
    """Of 70 B parameters on 80 GiB: without recomputation nothing fits."""
    known = device_gib is not None
    return Plan(
        module="Big",
        num_parameters=70 * 10**9,
        num_trainable=70 * 10**9,
        world_size=64,
        ranks_per_host=8,
        precision="bf16-mixed",
        micro_batch=1,
        micro_batches=1,
        optimizers=("AdamW",),
        device="cuda",
        device_bytes=device_gib * GIB if device_gib is not None else None,
        usable_bytes=0.9 * device_gib * GIB if device_gib is not None else None,
        flops_per_micro_batch=1.0,
        rows=(a_row("ddp", 0, 1600, 1577), a_row("zero1", 1, 276, 161), a_row("zero3", 3, 148, 34)),
        choice="zero3",
        checkpointing=known,
        recomputed="each unit's activations recomputed",
        reason="zero3: it fits.",
    )


def drawn(plan: Plan, path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from matplotlib import pyplot

    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    plan.plot(str(path))
    return figures[0].axes[0]


def test_both_variants_the_pick_and_the_device(tmp_path, monkeypatch):
    axes = drawn(a_plan(80.0), tmp_path / "plan.png", monkeypatch)
    assert [text.get_text().strip() for text in axes.texts] == [
        *("1600.0 >", "1577.0 >"),
        *("276.0 >", "161.0"),
        *("148.0", "34.0 <- take"),
    ]
    assert axes.get_xlim()[1] < 200
    assert [line.get_xdata()[0] for line in axes.lines] == [80.0, 72.0]
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    assert len(hatched) == 3 * len(KINDS)
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_without_a_device_the_scale_shows_stage_3(tmp_path, monkeypatch):
    axes = drawn(a_plan(None), tmp_path / "plan.png", monkeypatch)
    assert 148 < axes.get_xlim()[1] < 200
    assert not axes.lines
    assert [text.get_text() for text in axes.texts if "take" in text.get_text()] == [" 148.0 <- take"]
