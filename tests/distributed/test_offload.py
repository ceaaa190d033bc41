"""``offload="cpu"`` on a CPU-only machine: the same names run, and give the same losses, weights and metrics.

Exactly the same where the same kernels run; an Adam whose user chose no kernel is fused (``optim.fusible_groups``), so
it may round differently. What a failure localises: one kind under every stage to what the kind names; everything to
``fully_shard``'s policy. Where things lie on an accelerator is ``tests/unit/test_host_shards.py``.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig, strategy
from lightning_zero.engines import optimizer_step
from lightning_zero.engines.model_state import KINDS, PLACES
from tests.helpers import account, whereabouts, zoo
from tests.helpers.ranks import outcome

pytestmark = pytest.mark.sampled

EXACT = (
    "sgd_momentum",
    "adamw_foreach",
    "third_party_lamb",
    "clip_by_norm",
    "accumulation_with_leftovers",
    "manual_skips_backward",
    "tied_embedding_and_head",
    "penalty_and_accumulation",
    "gradients_touched",
    "hand_made_average",
)
FUSED = ("adam", "unused_on_some_ranks_in_unit", "gan", "muon_and_adamw", "odd_parameters_together")
FUSED_TOLERANCE = 5e-6
"""Single precision's last digits over some twenty steps of Adam with eps=1e-4, relative to each tensor's largest."""
TOLERANCES = {"muon_and_adamw": zoo.KINDS["muon_and_adamw"].tolerance}  # not every CPU multiplies bfloat16 alike
CASES = [
    pytest.param(
        kind, stage, marks=() if kind in ("clip_by_norm", "adam", "gan") or stage == 1 + i % 3 else pytest.mark.full
    )
    for i, kind in enumerate((*EXACT, *FUSED))
    for stage in (1, 2, 3)
]


@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_trains_as_without(ranks2, kind, stage):
    settings = {"stage": stage, **zoo.BLOCKS}
    reference = ranks2(zoo.train, kind, settings, True)
    result = ranks2(zoo.train, kind, {**settings, "offload": "cpu"}, True)
    difference = zoo.difference(result, reference)
    if kind in EXACT:
        assert difference.largest == 0, difference
    else:
        assert difference.largest < TOLERANCES.get(kind, FUSED_TOLERANCE), difference


def _fit(strategy: Any, precision: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = zoo.make_module("clip_by_norm")
    trainer = zoo.make_trainer(strategy, precision=precision, gradient_clip_val=0.1, **options)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    return module.losses, {name: value.double() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("precision", "stage"), [("bf16-mixed", 1), ("bf16-mixed", 3), ("bf16-true", 2)])
def test_every_precision_as_without(ranks2, precision, stage):
    settings = {"stage": stage, **zoo.BLOCKS}
    for result, reference in zip(
        ranks2(_fit, {**settings, "offload": "cpu"}, precision), ranks2(_fit, settings, precision), strict=True
    ):
        assert result[0] == reference[0]
        assert all(torch.equal(result[1][name], reference[1][name]) for name in reference[1])


def test_replicas_as_without(ranks4):
    settings = {"stage": 3, "shard_size": 2, **zoo.BLOCKS}
    reference = ranks4(zoo.train, "clip_by_norm", settings)
    result = ranks4(zoo.train, "clip_by_norm", {**settings, "offload": "cpu"})
    assert zoo.difference(result, reference).largest == 0


def test_registered_names(ranks2):
    for stage in (1, 2, 3):
        reference = ranks2(zoo.train, "sgd_momentum", f"zero{stage}")
        result = ranks2(zoo.train, "sgd_momentum", f"zero{stage}_offload")
        assert zoo.difference(result, reference).largest == 0


def _resumed(folder: str, saved: dict[str, Any], loaded: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of the second epoch: uninterrupted, and resumed under ``loaded`` from what ``saved`` wrote."""
    path = str(Path(folder) / "half.ckpt")
    module = zoo.make_module("parameter_groups")
    loader = DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH)
    trainer = zoo.make_trainer(saved, max_epochs=1)
    trainer.fit(module, loader)
    trainer.save_checkpoint(path)
    found = []
    for settings in (saved, loaded):
        module = zoo.make_module("parameter_groups")
        zoo.make_trainer(settings).fit(module, loader, ckpt_path=path)
        found.append(module.losses)
    return found[0], found[1]


@pytest.mark.parametrize("checkpoint", ["file", "sharded"])
def test_checkpoints_cross_over(ranks2, checkpoint):
    """Saved with offload and resumed without, and the other way; optimizer states land where the shards lie."""
    plain = {"stage": 2, **zoo.BLOCKS, "checkpoint": checkpoint}
    host = {**plain, "stage": 3, "offload": "cpu"}
    for saved, loaded in ((host, plain), (plain, host)):
        with tempfile.TemporaryDirectory() as folder:
            for expected, losses in ranks2(_resumed, folder, saved, loaded):
                assert len(losses) == len(expected) > 0
                assert losses == pytest.approx(expected, rel=FUSED_TOLERANCE)


def _train_by_way_of_copies(kind: str, settings: dict[str, Any]) -> zoo.Result:
    """What is read of a shard is a copy, as it is where the mesh is of another device."""
    from lightning_zero.comm import shards
    from lightning_zero.engines.fsdp2 import view

    with ExitStack() as stack:
        for module in (shards, view, optimizer_step):
            if hasattr(module, "is_off_mesh"):
                stack.enter_context(mock.patch.object(module, "is_off_mesh", lambda t: isinstance(t, DTensor)))
            stack.enter_context(mock.patch.object(module, "mesh_device", return_value=torch.device("cpu")))
        return zoo.train(kind, settings)


@pytest.mark.parametrize("kind", ["penalty_over_parameters", "third_party_lamb"])
def test_gradients_flow_through_copies_of_shards(ranks2, kind):
    settings = {"stage": 3, "offload": "cpu", **zoo.BLOCKS}
    result, reference = ranks2(_train_by_way_of_copies, kind, settings), ranks2(zoo.train, kind, settings)
    assert zoo.difference(result, reference).largest == 0


def _groups_during_steps(kind: str) -> tuple[list[Any], list[Any], list[str]]:
    """What ``fused`` is while the optimizer steps and afterwards, and what was said about it."""
    seen: list[Any] = []
    stand_ins = optimizer_step.ShardedStep.stand_ins

    @contextmanager
    def watched(step: Any, *args: Any) -> Any:
        with stand_ins(step, *args) as swap:
            seen.append([group.get("fused") for group in step.optimizer.param_groups])
            yield swap

    said: list[str] = []
    original, strategy.rank_zero_info = strategy.rank_zero_info, said.append
    try:
        with mock.patch.object(optimizer_step.ShardedStep, "stand_ins", watched):
            trainer = zoo.make_trainer({"stage": 3, "offload": "cpu", **zoo.BLOCKS}, max_steps=2)
            trainer.fit(zoo.make_module(kind), DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    finally:
        strategy.rank_zero_info = original
    after = [group.get("fused") for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return seen, after, [line for line in said if "fused" in line]


@pytest.mark.parametrize(
    ("kind", "during", "after", "said"),
    [
        ("adam", [True], [None], "Adam steps in host memory with PyTorch's fused kernel"),
        ("adamw_foreach", [None], [None], None),
        ("adamw_for_loop", [None], [None], None),
        ("sgd_momentum", [None], [None], None),
    ],
)
def test_adam_is_fused_unless_its_user_chose(ranks1, kind, during, after, said):
    seen, left, lines = ranks1(_groups_during_steps, kind)[0]
    assert seen == [during, during]
    assert left == after
    assert [line for line in lines if said and said in line] if said else not lines


def test_pinned_memory_needs_an_accelerator(ranks1):
    settings = {"stage": 3, "offload": OffloadConfig(target="cpu", pin_memory=True)}
    name, text = ranks1(outcome, zoo.train, "sgd_momentum", settings)[0]
    assert name == "ValueError"
    assert "offload.pin_memory=True on accelerator='cpu'" in text


ADAM = {"gradients": {"host": 2.0}, "optimizer": {"host": 4.0}}


@pytest.mark.usefixtures("nvme")
def test_in_files_are_parameters_masters_and_states(ranks2, tmp_path):
    settings = {"engine": "deepspeed", "stage": 3, "offload": OffloadConfig(target="nvme", path=str(tmp_path))}
    for found in ranks2(whereabouts.held, settings, whereabouts.LARGE, timeout_seconds=280):
        assert found["parameters"]["disk"] == pytest.approx(4.0, rel=0.01)  # of the step and of the module
        assert found["parameters"]["host"] < 0.01
        assert found["gradients"]["host"] == pytest.approx(2.0, rel=0.01)
        assert found["optimizer"]["disk"] == pytest.approx(4.0, rel=0.01)


@pytest.mark.usefixtures("deepspeed_ops")
@pytest.mark.parametrize(
    ("engine", "stage", "offload", "expected", "inside"),
    [
        ("fsdp2", 2, "cpu", {"parameters": {"host": 2.0}, **ADAM}, 4.0),
        ("fsdp2", 3, "cpu", {"parameters": {"host": 2.0}, **ADAM}, 2 * 4.0 / account.Stack.NUM_UNITS),  # and the next
        ("fsdp2", 3, "none", {kind: {"device": n} for kind, n in zip(KINDS, (2.0, 2.0, 4.0), strict=True)}, None),
        ("deepspeed", 2, "cpu", {"parameters": {"device": 4.0, "host": 2.0}, **ADAM}, 4.0),
    ],
)
def test_where_each_engine_keeps_its_state(ranks2, engine, stage, offload, expected, inside):
    """Bytes per parameter of two ranks in fp32 with AdamW: shards are half of 4, 4 and 8."""
    units = zoo.BLOCKS if engine == "fsdp2" else {}
    settings = {"engine": engine, "stage": stage, "offload": offload, **units}
    for found in ranks2(whereabouts.held, settings, timeout_seconds=280):
        for kind in KINDS:
            for place in PLACES:  # Adam's step counters come on top
                assert found[kind][place] == pytest.approx(expected[kind].get(place, 0.0), rel=1e-3, abs=1e-3), kind
        assert inside is None or found["inside"] == pytest.approx(inside, rel=1e-3)
