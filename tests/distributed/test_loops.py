"""Everything around training: other loops, a second run, what the module is afterwards, refusals.

The functions named ``_...`` run on every rank and return plain values; the tests compare them with DDP's or with what
must hold on every rank.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.engines import after_run
from lightning_zero.private.torch import DisableTorchFunction
from tests.helpers import zoo
from tests.helpers.ranks import outcome
from tests.helpers.zoo import KINDS, Zoo, make_module, make_trainer

TOLERANCE = 1e-5  # the order of sums over ranks, as in test_parity


def _loader(shuffle: bool = False, num_items: int = zoo.NUM_ITEMS) -> DataLoader:
    return DataLoader(zoo.RandomDataset(num_items), batch_size=zoo.BATCH, shuffle=shuffle)


def _strategy(stage: int, **settings: Any) -> dict[str, Any]:
    return {"stage": stage, **zoo.BLOCKS, **settings}


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _close(value: Any, reference: Any) -> bool:
    """Nested numbers and tensors agree within the tolerance."""
    if isinstance(reference, dict):
        return value.keys() == reference.keys() and all(_close(value[k], reference[k]) for k in reference)
    if isinstance(reference, (list, tuple)):
        return len(value) == len(reference) and all(map(_close, value, reference))
    if isinstance(reference, Tensor):
        return zoo._relative(value, reference) <= TOLERANCE
    if isinstance(reference, float):
        return value == pytest.approx(reference, rel=TOLERANCE)
    return value == reference


# ---------------------------------------------------------------------------------------------------------------------
# Validation, test and prediction: before, during, after and without fit
# ---------------------------------------------------------------------------------------------------------------------


class TwoLoaders(Zoo):
    """Two validation loaders, a test and a predict step, batch-dependent buffers."""

    def build(self) -> None:
        super().build()
        self.register_buffer("num_validated", torch.tensor(0.0))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.num_validated += 1
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not torch.is_grad_enabled()
        return self(batch[0])


def _all_loops(strategy: Any, inference_mode: bool) -> dict[str, Any]:
    """Runs every loop before, between and after two fits, with one Trainer, and collects what each gave."""
    torch.manual_seed(5 + 1000 * int(os.environ["RANK"]))
    module = TwoLoaders()
    trainer = make_trainer(strategy, inference_mode=inference_mode, max_epochs=1)
    two = [_loader(num_items=12), _loader(num_items=20)]
    seen: dict[str, Any] = {}
    for index, loop in enumerate(["validate", "test", "predict", "fit", "predict", "fit", "validate", "test"]):
        if inference_mode:  # Lightning switches it off under gloo by itself: put it back on, as NCCL has it
            for inner in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                inner.inference_mode = True
            trainer.fit_loop.epoch_loop.val_loop.inference_mode = True
        if loop == "fit":
            trainer.fit(module, _loader(shuffle=True), two)  # with the sampler that Lightning puts in
            seen[f"{index} fit"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
            trainer.fit_loop.max_epochs += 1
        elif loop == "predict":
            seen[f"{index} predict"] = torch.cat(trainer.predict(module, _loader()))
        else:
            results = getattr(trainer, loop)(module, two if loop == "validate" else _loader(), verbose=False)
            seen[f"{index} {loop}"] = [{k: float(v) for k, v in result.items()} for result in results]
    return seen | {"weights": _weights(module), "losses": list(module.losses)}


def test_loops_give_what_ddp_gives(ranks2) -> None:
    reference = ranks2(_all_loops, "ddp", False)
    for result, expected in zip(ranks2(_all_loops, _strategy(3), True), reference, strict=True):
        for key in expected:
            assert _close(result[key], expected[key]), key


# ---------------------------------------------------------------------------------------------------------------------
# Several runs in one process
# ---------------------------------------------------------------------------------------------------------------------


def _fit_in_turn(strategies: list[Any]) -> dict[str, Any]:
    """Fits one module under one strategy after the other, each with a fresh optimizer, as Trainer does."""
    module = make_module("adam")
    for strategy in strategies:
        make_trainer(strategy, max_epochs=1, limit_val_batches=0).fit(module, _loader())
    return {"losses": list(module.losses), "weights": _weights(module)}  # type: ignore[arg-type]


def test_one_module_is_fitted_under_one_strategy_after_the_other(ranks2) -> None:
    strategies = [
        _strategy(3, after_fit="sharded"),
        {"stage": 3},
        _strategy(3, units=["Block"]),
        _strategy(1, after_fit="sharded"),
        _strategy(2),
        "ddp",
    ]
    reference = ranks2(_fit_in_turn, ["ddp"] * len(strategies))
    for result, expected in zip(ranks2(_fit_in_turn, strategies), reference, strict=True):
        assert _close(result, expected)


class LooksBefore(TwoLoaders):
    """Looks at its weights in the hooks that come before the strategy's set-up."""

    def build(self) -> None:
        super().build()
        self.seen: list[tuple[str, int, float]] = []
        self.num_closed = 0

    def look(self, hook: str) -> None:
        with torch.no_grad():
            self.seen += [(hook, p.numel(), float(p.norm())) for p in self.parameters()]

    def setup(self, stage: str) -> None:
        with DisableTorchFunction():  # looking gathers
            self.num_closed += sum(p.untyped_storage().nbytes() == 0 for p in self.parameters())
        self.look(f"setup {stage}")
        first = next(self.parameters())
        first.data.mul_(1.01)

    def configure_model(self) -> None:
        self.look("configure_model")


def _sharded_in_turn(strategy: Any, path: str) -> dict[str, Any]:
    """Fit, fit on, and the other loops with an older checkpoint, on a module that each run leaves sharded."""
    torch.manual_seed(5)
    module = LooksBefore()
    given = strategy if strategy == "ddp" else {**strategy, "after_fit": "sharded"}
    loaders = [_loader(num_items=12), _loader(num_items=20)]
    seen: dict[str, Any] = {}
    trainer = make_trainer(given, max_epochs=1)
    trainer.fit(module, _loader(), loaders)
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, _loader(), loaders)
    with DisableTorchFunction():
        seen["away"] = any(p.untyped_storage().nbytes() == 0 for p in module.parameters())
    seen["tested"] = trainer.test(module, _loader(), verbose=False)
    seen["validated"] = trainer.validate(module, loaders, ckpt_path=path, verbose=False)
    seen["predicted"] = torch.cat(trainer.predict(module, _loader()))
    seen["weights"], seen["afterwards"] = _weights(module), float(module.loss(next(iter(_loader()))))
    seen["before"], seen["closed"] = module.seen, module.num_closed > 0
    return seen


def test_each_run_goes_on_from_shards(ranks2, tmp_path: Path) -> None:
    """Hooks before the set-up and checkpoints find an ordinary module, sharded until they touch it."""
    reference = ranks2(_sharded_in_turn, "ddp", str(tmp_path / "a.ckpt"))
    results = ranks2(_sharded_in_turn, _strategy(3), str(tmp_path / "a.ckpt"))
    for result, expected in zip(results, reference, strict=True):
        assert result["away"]
        assert result["closed"]
        for key in expected.keys() - {"away", "closed"}:
            assert _close(result[key], expected[key]), key


def _after_a_sharded_run(strategy: Any, alone: bool) -> dict[str, Any]:
    """Uses of a module between runs; ``alone``: what comes of a forward on rank 1 alone."""
    module = make_module("adam")
    with mock.patch.object(after_run, "READ_SECONDS", 2.0 if alone else after_run.READ_SECONDS):
        make_trainer(strategy, max_epochs=1, limit_val_batches=0).fit(module, _loader())
    module.trainer = None
    batch = next(iter(_loader()))
    if alone:
        return {"refused": outcome(module.loss, batch) if int(os.environ["RANK"]) == 1 else None}
    saved = io.BytesIO()
    torch.save(module.net.head, saved)
    copied, loaded = copy.deepcopy(module), torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    return {
        "types": [{type(p) for p in each.parameters()} for each in (copied, loaded)],
        "weights": [_weights(each) for each in (copied, loaded)],
        "losses": [each.loss(batch).item() for each in (module, copied)],
    }


def test_a_module_that_a_run_left_sharded_is_full_when_it_is_used(ranks2) -> None:
    """Copied, pickled and run between two runs; a use on one rank alone must not wait for ever."""
    strategy = _strategy(3, after_fit="sharded")
    for found, expected in zip(
        ranks2(_after_a_sharded_run, strategy, False), ranks2(_after_a_sharded_run, "ddp", False), strict=True
    ):
        assert _close(found, expected)
    kind, text = ranks2(_after_a_sharded_run, strategy, True)[1]["refused"]
    assert kind == "RuntimeError"
    assert "a read of a sharded parameter or optimizer state" in text


# ---------------------------------------------------------------------------------------------------------------------
# After fit the module is an ordinary module
# ---------------------------------------------------------------------------------------------------------------------


def _ordinary_afterwards(strategy: Any, name: str) -> dict[str, Any]:
    module = make_module(name, different_seeds=True)
    classes = {n: type(m) for n, m in module.named_modules()}
    keys = list(module.state_dict())
    originals = dict(module.named_parameters())
    requires_grad = {n: p.requires_grad for n, p in originals.items()}
    dtypes = {n: (p.dtype, p.shape) for n, p in originals.items()}
    hooks = _num_hooks(module)
    make_trainer(strategy, max_epochs=1, limit_val_batches=0).fit(module, DataLoader(KINDS[name].dataset(), zoo.BATCH))
    parameters = dict(module.named_parameters())
    seen: dict[str, Any] = {
        "classes": classes == {n: type(m) for n, m in module.named_modules()},
        "keys": keys == list(module.state_dict()),
        "plain": all(type(p) is nn.Parameter for p in parameters.values()),
        "same_objects": all(parameters[n] is p for n, p in originals.items()),
        "requires_grad": requires_grad == {n: p.requires_grad for n, p in parameters.items()},
        "dtypes": dtypes == {n: (p.dtype, p.shape) for n, p in parameters.items()},
        "no_attributes": not any(vars(p) for p in parameters.values()),
        "hooks": hooks == _num_hooks(module),
        "weights": _weights(module),
    }
    if int(os.environ["RANK"]) == 1:  # one rank alone: anything collective in here would hang
        module.eval()
        x, y = torch.utils.data.default_collate([KINDS[name].dataset()[i] for i in range(3)])
        first = module.loss((x, y))
        copied = copy.deepcopy(module)
        seen["deepcopy"] = torch.equal(copied.loss((x, y)), first)
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        buffer.seek(0)
        fresh = KINDS[name].module()
        fresh.configure_model()
        fresh.load_state_dict(torch.load(buffer))
        fresh.eval()
        seen["state_dict"] = torch.equal(fresh.loss((x, y)), first)
        module.trainer = None
        module.options = {}  # the kind's own lambdas, which no pickle takes
        seen["pickle"] = torch.equal(pickle.loads(pickle.dumps(module)).loss((x, y)), first)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1.0)
        seen["writable"] = not torch.equal(module.loss((x, y)), first)
        module.train()
        loss = module.loss((x, y))
        loss.backward()
        grads = [p.grad for p in module.parameters() if p.requires_grad and p.numel()]
        seen["trainable"] = all(g is not None and type(g) is Tensor for g in grads)
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1).step()
    return seen


def _num_hooks(module: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    return sum(len(getattr(m, name)) for m in module.modules() for name in names)


def test_afterwards_the_module_is_ordinary_on_every_rank(ranks2) -> None:
    name = "odd_shapes_and_dtypes"
    results = ranks2(_ordinary_afterwards, _strategy(3, after_fit="whole"), name)
    reference = ranks2(_ordinary_afterwards, "ddp", name)
    for result, expected in zip(results, reference, strict=True):
        assert result.keys() == expected.keys()
        assert _close(result["weights"], expected["weights"])
        assert [key for key, value in result.items() if value is False] == []


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: the same clear error on every rank, before training, never a hang
# ---------------------------------------------------------------------------------------------------------------------


class NothingToTrain(Zoo):
    def build(self) -> None:
        self.net = zoo.Net().requires_grad_(False)

    def configure_optimizers(self) -> None:
        return None


class ReplacesParameter(Zoo):
    def on_fit_start(self) -> None:
        self.net.head.weight = nn.Parameter(torch.zeros(zoo.WIDTH, zoo.WIDTH))


class ReplacesInMidRun(Zoo):
    """Once it has trained."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.head = nn.Linear(zoo.WIDTH, zoo.WIDTH)
            self.losses.clear()


class NeverShaped(Zoo):
    def build(self) -> None:
        self.net = nn.Sequential(nn.LazyLinear(zoo.WIDTH))  # type: ignore[assignment]


class AddsLayer(Zoo):
    def on_train_start(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)
            self.optimizers().optimizer.add_param_group({"params": list(self.late.parameters())})


class ReplacesLayerInConfigureOptimizers(Zoo):
    def configure_optimizers(self) -> Any:
        self.net.head = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        return super().configure_optimizers()


class StopsAlone(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.max_epochs = 1


def _fit_with_a_callback_of_one_rank() -> None:
    callbacks = [StopsAlone()] if os.environ["RANK"] == "1" else []
    make_trainer(_strategy(3), max_epochs=2, callbacks=callbacks).fit(Zoo(), _loader())


def test_all_ranks_refuse_where_one_ends_its_training_early(ranks2) -> None:
    """SWA on one rank alone is an epoch more there; the others would wait for it at the end of the run."""
    for error, text in ranks2(outcome, _fit_with_a_callback_of_one_rank, timeout_seconds=50):
        assert error == "ValueError", text
        assert "rank 0 begins training batch 0" in text
        assert "rank 1 ends its training after" in text
        assert "the same callbacks" in text


class Strays(Zoo):
    """All ranks run the blocks in their order for three steps; then rank 1 skips one (``skips``), or changes the next
    one's weights just before its turn, when they have been gathered ahead (``writes``). With ``differentiates`` the
    blocks are gathered once more before the forward ends."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        strays = self.global_rank == 1 and self.global_step >= 3
        start = x = self.net.stem(x)
        for index, block in enumerate(self.net.blocks):
            if strays and index == self.options.get("writes"):
                with torch.no_grad():
                    block.up.weight.mul_(0.5)
            if not strays or index != self.options.get("skips"):
                x = block(x)
        if self.options.get("differentiates"):
            torch.autograd.grad(x.sum(), start, retain_graph=True)
            assert self.global_step < 3, "gathered before all ranks were heard"
        return F.mse_loss(self.net.head(x), y)


def _fit_until_one_strays(options: dict[str, Any]) -> None:
    make_trainer(_strategy(3), max_epochs=4).fit(Strays(**options), _loader())


def test_a_backward_inside_the_forward_gathers_nothing_before_ranks_agree(ranks2) -> None:
    options = {"skips": 2, "differentiates": True}
    for error, text in ranks2(outcome, _fit_until_one_strays, options, timeout_seconds=50):
        assert error == "ValueError", text
        assert re.search(r"units .*net.blocks.2.* ran on some ranks only", text), text


def test_all_ranks_refuse_where_one_touches_a_parameter_in_a_step(ranks2) -> None:
    for error, text in ranks2(outcome, _fit_until_one_strays, {"writes": 2}, timeout_seconds=50):
        assert error == "ValueError", text
        assert re.search(r"in a step, only some ranks read or write a parameter .* do this on every rank", text), text


def _fit_badly(strategy: Any, module: type[Zoo]) -> list[float]:
    made = module()
    try:
        make_trainer(strategy).fit(made, _loader())
    finally:
        assert made.losses == [], "an error before training, please"
    return made.losses


@pytest.mark.parametrize(
    ("strategy", "module", "parts"),
    [
        ({"stage": 3, "units": ["Blok*"]}, Zoo, ["units=", "Blok*", "Block"]),
        ({"stage": 2, "units": ["net.blocks"]}, Zoo, ["units=", "net.blocks", "containers"]),
        ({"stage": 1}, NothingToTrain, ["NothingToTrain", "no trainable parameter"]),
        ({"stage": 3}, ReplacesParameter, ["net.head.weight", "replaced"]),
        ({"stage": 1}, ReplacesInMidRun, ["net.head.weight", "replaced"]),
        ({"stage": 3, "engine": "deepspeed"}, ReplacesInMidRun, ["net.head.weight", "replaced"]),
        ({"stage": 3}, NeverShaped, ["parameter 'net.0.weight' of a lazy layer has no shape yet"]),
        ({"stage": 2}, AddsLayer, ["late.weight", "added"]),
        ({"stage": 3}, ReplacesLayerInConfigureOptimizers, ["net.head.weight", "replaced"]),
    ],
    ids=str,
)
def test_bad_input_is_refused_on_every_rank(strategy: Any, module: type[Zoo], parts: list[str], ranks2) -> None:
    for error, text in ranks2(outcome, _fit_badly, strategy, module, timeout_seconds=30):
        assert error in ("ValueError", "MisconfigurationException"), text
        for part in parts:
            assert part.lower() in text.lower(), text


def _root_device_of_another_kind(kind: str) -> None:
    """What the Trainer does once it has found an accelerator of this kind, without having one."""
    from lightning_zero import ZeroStrategy

    strategy = ZeroStrategy(stage=3)
    strategy.parallel_devices = [torch.device(kind, 0)]
    strategy._configure_launcher()


def test_accelerators_that_cannot_are_refused(ranks1) -> None:
    error, text = ranks1(outcome, _root_device_of_another_kind, "mps")[0]
    assert error in ("ValueError", "MisconfigurationException"), (error, text)
    assert "mps" in text
