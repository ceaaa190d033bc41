"""Modules whose parameters are not there, or no longer those of the start: refused by name, on every rank. DDP refuses
them, too, in one way or another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import places
from tests.helpers.ranks import outcome
from tests.helpers.zoo import DataLoader, RandomDataset, make_trainer

NO_SHAPE = "parameter 'net.0.weight' of a lazy layer has no shape yet"
REPLACED = "parameter 'net.head.weight' was replaced or added after the strategy set the module up"


def _fit(kind: str, strategy: dict[str, Any]) -> tuple[str, str]:
    module = places.LazyLayers(never=True) if kind == "lazy" else places.ReplacedInMidRun()
    trainer = make_trainer(strategy, max_epochs=3)
    return outcome(trainer.fit, module, DataLoader(RandomDataset(8), batch_size=2))


@pytest.mark.parametrize(
    ("kind", "engine", "stage", "text"),
    [("lazy", "fsdp2", 3, NO_SHAPE), ("replaced", "fsdp2", 1, REPLACED), ("replaced", "deepspeed", 3, REPLACED)],
)
def test_refused_by_name(ranks2: Any, kind: str, engine: str, stage: int, text: str) -> None:
    for error, message in ranks2(_fit, kind, {"engine": engine, "stage": stage}):
        assert error == "ValueError"
        assert message.startswith(text)
