"""The sequence of one step at stage 3 in ``docs/architecture.md`` is what really happens, in that order."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from tests.helpers import zoo
from tests.helpers.ranks import ROOT

EVENTS = {
    r"FSDP::all_gather(?: \(module\.(?P<unit>[\w.]+)\))?": "gather",
    r"FSDP::post_forward(?: \(module\.(?P<unit>[\w.]+)\))?": "forward",
    r"FSDP::post_backward_reshard(?: \(module\.(?P<unit>[\w.]+)\))?": "backward",
    r"FSDP::post_backward_reduce(?: \(module\.(?P<unit>[\w.]+)\))?": "reduce",
    r"c10d::send": "agree",
    r"Optimizer\.step#.*": "step",
}
"""Names that the profiler sees -> the words of the page."""


class TwoUnits(zoo.Zoo):
    """Two units and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH))
        self.scale = nn.Parameter(torch.ones(zoo.WIDTH))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return ((self.net(batch[0]) * self.scale - batch[1]) ** 2).mean()


def _sequence() -> list[tuple[str, str]]:
    trainer = zoo.make_trainer({"stage": 3, "transport": "torch", **zoo.BLOCKS}, max_steps=2)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.fit(TwoUnits(), DataLoader(zoo.RandomDataset(4 * zoo.BATCH), batch_size=zoo.BATCH))
    found = []
    for _, name in sorted((event.time_range.start, event.name) for event in seen.events()):
        for pattern, word in EVENTS.items():
            if match := re.fullmatch(pattern, name):
                who = match.groupdict().get("unit") or {"agree": "ranks", "step": "optimizer"}.get(word, "root")
                found.append((who, word))
    first = found.index(("optimizer", "step"))
    begin, end = found.index(("root", "gather"), first), found.index(("optimizer", "step"), first + 1)
    return found[begin : end + 1]


def test_the_page_shows_the_sequence_of_a_step(ranks2) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"test_step_sequence\.py -->\n```\n(.*?)```", page, re.DOTALL)
    assert block is not None
    shown = [(words[0], words[1]) for line in block.group(1).splitlines() if (words := line.split()[:2])]
    for found in ranks2(_sequence):
        assert found == shown
