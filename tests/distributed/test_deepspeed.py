"""What the engine ``deepspeed`` owes beyond the table of kinds (``test_parity``): other loops, later runs, what the
module is afterwards, checkpoints to and from other strategies, offload to host memory and to files.

A failure in ``test_loops...`` is about gathering outside of training, in ``..._ordinary...`` about what DeepSpeed
leaves behind, in ``test_checkpoint...`` about pieces and whole tensors.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from tests.distributed import test_loops as loops
from tests.helpers import moves, zoo
from tests.helpers.ranks import outcome
from tests.helpers.zoo import Zoo, make_trainer

pytestmark = pytest.mark.sampled

STAGES = (1, 2, 3)
SLOW = 180.0
"""Seconds; a run takes about two on a quiet machine."""


def _strategy(stage: int, **settings: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "stage": stage, **settings}


def _full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


# -- loops and runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "order"),
    [(3, "before_and_after_fit"), (3, "without_fit"), (2, "between_two_fits")]
    + [_full(stage, order) for stage in STAGES for order in loops.ORDERS],
)
def test_loops_give_what_ddp_gives(stage: int, order: str, ranks2) -> None:
    arguments = (loops.ORDERS[order], False, order == "before_and_after_fit")
    reference = ranks2(loops._loops_in_order, "ddp", *arguments)
    results = ranks2(loops._loops_in_order, _strategy(stage), *arguments, timeout_seconds=SLOW)
    for result, expected in zip(results, reference, strict=True):
        for key in expected:
            assert loops._close(result[key], expected[key]), key


@pytest.mark.parametrize("stage", [_full(1), _full(2), pytest.param(3, marks=pytest.mark.rest)])
def test_each_run_goes_on_from_shards(stage: int, ranks2, tmp_path) -> None:
    reference = ranks2(loops._sharded_in_turn, "ddp", str(tmp_path / "a.ckpt"), False)
    arguments = _strategy(stage), str(tmp_path / "a.ckpt"), False
    results = ranks2(loops._sharded_in_turn, *arguments, timeout_seconds=SLOW)
    for result, expected in zip(results, reference, strict=True):
        assert result["away"] == (stage == 3)
        for key in expected.keys() - {"away"}:
            assert loops._close(result[key], expected[key]), key


def test_runs_under_both_engines_in_turn(ranks2) -> None:
    strategies = [_strategy(3), {"stage": 3, **zoo.BLOCKS}, _strategy(1), "ddp"]
    reference = ranks2(loops._fit_in_turn, ["ddp"] * len(strategies), True)
    for result, expected in zip(
        ranks2(loops._fit_in_turn, strategies, True, timeout_seconds=SLOW), reference, strict=True
    ):
        assert loops._close(result, expected)


def _what_a_run_leaves_replaced(strategy: dict[str, Any]) -> list[str]:
    """Names in torch that are something else after a run than before it."""
    import deepspeed  # noqa: F401  (what its import adds is not ours to judge)

    places = (
        torch,
        torch.nn.functional,
        torch.nn.Module,
        torch.nn.Linear,
        torch.Tensor,
        torch.optim.Optimizer,
        torch.autograd.Function,
        torch.distributed,
    )
    before = [dict(vars(place)) for place in places]
    zoo.train("adam", strategy)
    return [
        f"{place.__name__}.{name}"
        for place, names in zip(places, before, strict=True)
        for name, value in vars(place).items()
        if callable(value) and names.get(name) is not value
    ]


def test_torch_is_left_as_found(ranks2) -> None:
    """DeepSpeed keeps an ``F.linear`` of its own, which fails on weights that fsdp2 has sharded."""
    assert ranks2(_what_a_run_leaves_replaced, _strategy(3), timeout_seconds=SLOW) == [[], []]
    assert ranks2(_linear_is_torchs) == [True, True]  # so the run before did not begin with another one


def _linear_is_torchs() -> bool:
    return torch.nn.functional.linear is torch._C._nn.linear


@pytest.mark.parametrize(
    ("stage", "name"),
    [(3, "odd_parameters_together"), (1, "tied_blocks"), (3, "frozen")]
    + [_full(stage, name) for stage in STAGES for name in ("adam", "tied_blocks", "gru", "frozen", "keyword_blocks")],
)
def test_afterwards_the_module_is_ordinary_on_every_rank(stage: int, name: str, ranks2) -> None:
    settings = _strategy(stage, after_fit="whole")
    results = ranks2(loops._ordinary_afterwards, settings, name, timeout_seconds=SLOW)
    reference = ranks2(loops._ordinary_afterwards, "ddp", name)
    for result, expected in zip(results, reference, strict=True):
        assert result.keys() == expected.keys()
        assert loops._close(result["weights"], expected["weights"])
        assert [key for key, value in result.items() if value is False] == []


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_always_holds_the_modules_own_parameters(stage: int, ranks2) -> None:
    for seen in ranks2(loops._optimizer_holds_parameters, _strategy(stage), timeout_seconds=SLOW):
        assert seen == dict.fromkeys(("train_start", "before_step", "batch_end", "epoch_end", "after"), True)


def _whole_for_a_while(stage: int) -> dict[str, Any]:
    """One rank alone runs the module inside ``full_parameters``; what rank 0 writes with ``modify`` counts."""
    seen: dict[str, Any] = {}

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx != 1 or trainer.current_epoch:
                return
            with trainer.strategy.full_parameters(module):
                if trainer.global_rank == 1:
                    seen["alone"] = module(torch.ones(2, zoo.WIDTH)).detach()
            with trainer.strategy.full_parameters(module, modify=True), torch.no_grad():
                if trainer.is_global_zero:
                    module.net.head.weight.zero_()
            seen["read"] = module.net.head.weight.detach().abs().sum().item()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and not trainer.current_epoch:
                seen["next"] = module(torch.ones(2, zoo.WIDTH)).detach()

    torch.manual_seed(4)
    module = Zoo()
    make_trainer(_strategy(stage), callbacks=[Looks()], limit_val_batches=0).fit(module, loops._loader())
    return seen | {"bias": module.net.head.bias.detach()}


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_whole_for_a_while(stage: int, ranks2) -> None:
    first, second = ranks2(_whole_for_a_while, stage, timeout_seconds=SLOW)
    assert second["alone"].abs().sum() > 0
    assert first["read"] == second["read"] == 0.0
    for seen in (first, second):  # a head of zeros gives its bias
        assert torch.equal(seen["next"][0], seen["next"][1])


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "name"),
    [(3, "adamw_for_loop"), (1, "gan"), (2, "odd_parameters_together")]
    + [_full(s, n) for s in STAGES for n in ("parameter_groups", "gan", "odd_parameters_together", "sgd_momentum")],
)
def test_checkpoints_go_to_and_from_ddp_and_fsdp2(stage: int, name: str, ranks2, tmp_path: Path) -> None:
    def fit(strategy: Any, to: str, resume: str | None, epochs: int) -> list[dict[str, Any]]:
        return ranks2(loops._fit_and_save, strategy, name, str(tmp_path / to), resume, epochs, timeout_seconds=SLOW)

    ours, ddps, ddp = str(tmp_path / "ours.ckpt"), str(tmp_path / "ddps.ckpt"), zoo.KINDS[name].reference
    fit(_strategy(stage), "ours.ckpt", None, 1)
    fit(ddp, "ddps.ckpt", None, 1)
    result, expected = (torch.load(path, weights_only=False) for path in (ours, ddps))
    assert result.keys() - {"lightning_zero"} == expected.keys()
    assert loops._close(result["state_dict"], expected["state_dict"])
    assert loops._close(loops._comparable(result["optimizer_states"]), loops._comparable(expected["optimizer_states"]))
    straight = fit(ddp, "straight.ckpt", None, 2)
    for resumed in (
        fit(ddp, "a.ckpt", ours, 2),
        fit({"stage": stage, **zoo.BLOCKS}, "b.ckpt", ours, 2),
        fit(_strategy(stage), "c.ckpt", ddps, 2),
    ):
        for rank in range(2):
            half = len(straight[rank]["losses"]) // 2
            assert loops._close(resumed[rank]["losses"], straight[rank]["losses"][half:])
            assert loops._close(resumed[rank]["weights"], straight[rank]["weights"])


_SHARDED_MOVES = [
    moves.Move("zero3_deepspeed", 2, "sharded", "zero2", 2, "file", "mid-epoch, stateful", "features"),
    moves.Move("zero3_deepspeed", 2, "sharded-async", "ddp", 2, "file", "epoch end", "two optimizers"),
    moves.Move("zero2", 2, "sharded", "zero3_deepspeed", 2, "sharded-async", "epoch end", "two optimizers"),
]
_MORE_SHARDED_MOVES = [
    moves.Move(f"zero{source}_deepspeed", 2, one, f"zero{target}_deepspeed", ranks, other, moment, kind)
    for source, target, ranks in ((1, 3, 3), (2, 1, 1), (3, 2, 3))
    for one, other in (("sharded", "file"), ("sharded-async", "sharded"))
    for moment in moves.STOPS
    for kind in ("features", "two optimizers")
]


@pytest.mark.parametrize("move", [*_SHARDED_MOVES, *map(_full, _MORE_SHARDED_MOVES)], ids=str)
def test_checkpoints_in_folders_go_to_and_from_other_strategies(move: moves.Move, ranks, tmp_path: Path) -> None:
    assert moves.Travel(ranks, tmp_path).difference(move) <= moves.TOLERANCES[move.kind]


# -- offload ---------------------------------------------------------------------------------------------------------


class Wide(Zoo):
    """Large enough that its states go to files: DeepSpeed leaves what is below 1 MiB per rank in memory."""

    def build(self) -> None:
        blocks = (nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(2))
        self.net = nn.Sequential(nn.Linear(zoo.WIDTH, 512), *blocks, nn.Linear(512, zoo.WIDTH))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class BuiltWide(Wide):
    """The same, sharded layer by layer while it is built."""

    def build(self) -> None:
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            super().build()
            with torch._C.DisableTorchFunction():
                self.options["whole"] = sum(p.untyped_storage().nbytes() for p in self.parameters())


def _train_wide(
    strategy: Any, resume: str | None, save: str | None, epochs: int, kind: type[Wide] = Wide
) -> dict[str, Any]:
    torch.manual_seed(3 + 100 * int(os.environ["RANK"]) * (strategy != "ddp"))
    module, on_disk = kind(), []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
            engine = getattr(trainer.strategy, "engine", None)
            folder = engine and engine.offload_path
            if folder:
                on_disk.append(sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()))

    batch = 12 // int(os.environ["WORLD_SIZE"])  # the same global batches, dealt out
    options: dict[str, Any] = {"max_epochs": epochs, "limit_val_batches": 0, "callbacks": [Looks()]}
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, DataLoader(zoo.RandomDataset(36), batch_size=batch), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    whole = module.options.get("whole")
    return {"losses": module.losses, "weights": loops._weights(module), "on_disk": on_disk, "whole": whole}


def _mean_losses(results: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([r["losses"] for r in results]).mean(0)


@pytest.mark.usefixtures("nvme")
@pytest.mark.parametrize(
    ("offload", "kind"), [("nvme", Wide), ("nvme", BuiltWide), pytest.param("cpu", Wide, marks=pytest.mark.full)]
)
def test_offloaded_runs_resume_with_the_uninterrupted_runs_losses(
    offload: str, kind: Any, ranks, tmp_path: Path
) -> None:
    """DeepSpeed's own NVMe checkpoints restart from initial weights, or without Adam's step count, silently."""
    path = str(tmp_path / "half.ckpt")
    settings = _strategy(3, offload=offload)
    if offload == "nvme":
        from lightning_zero.config import OffloadConfig

        folder = tmp_path / "fast"
        folder.mkdir()
        settings["offload"] = OffloadConfig(target="nvme", path=str(folder))
    straight = ranks(_train_wide, "ddp", None, None, 2, world_size=2)
    half = ranks(_train_wide, settings, None, path, 1, kind, world_size=2, timeout_seconds=SLOW)
    if kind is BuiltWide:
        assert all(r["whole"] == 0 for r in half)
    numel = sum(p.numel() for p in Wide().parameters())
    if offload == "nvme":
        # masters, two Adam states and the parameters themselves, 4 bytes each
        assert all(4 * 4 * numel * 0.95 < r["on_disk"][-1] < 5 * 4 * numel for r in half)
        assert list(folder.iterdir()) == []  # removed at the end
    expected = _mean_losses(straight)
    assert zoo._relative(_mean_losses(half), expected[:3]) < 1e-5
    for world_size in (2, 3):
        resumed = ranks(_train_wide, settings, path, None, 2, kind, world_size=world_size, timeout_seconds=SLOW)
        assert zoo._relative(_mean_losses(resumed), expected[3:]) < 1e-5
        assert zoo.largest_difference(resumed[0]["weights"], straight[0]["weights"])[0] < 1e-5


class AdagradWide(Wide):
    """Its states are made when it is, not in its first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=1e-2, initial_accumulator_value=0.1)


@pytest.mark.usefixtures("nvme")
def test_states_that_a_constructor_makes_go_to_files_too(ranks2, tmp_path: Path) -> None:
    from lightning_zero.config import OffloadConfig

    settings = _strategy(3) | {"offload": OffloadConfig(target="nvme", path=str(tmp_path))}
    results = ranks2(_train_wide, settings, None, None, 1, AdagradWide, timeout_seconds=SLOW)
    reference = ranks2(_train_wide, "ddp", None, None, 1, AdagradWide)
    numel = sum(p.numel() for p in Wide().parameters())
    for result, expected in zip(results, reference, strict=True):
        assert loops._close(result["losses"], expected["losses"])
        assert loops._close(result["weights"], expected["weights"])
        assert result["on_disk"][-1] > 3 * 4 * numel * 0.95  # parameters, masters and sums


@pytest.mark.usefixtures("deepspeed_ops")
@pytest.mark.parametrize("stage", [1, _full(2), 3])
@pytest.mark.parametrize("name", ["parameter_groups", _full("gan"), _full("accumulation_and_clip")])
def test_offload_to_host_memory_equals_ddp(stage: int, name: str, ranks2) -> None:
    """By DeepSpeed's CPU Adam: another order of operations inside a step, so not bit for bit."""
    results = ranks2(zoo.train, name, _strategy(stage, offload="cpu"), True, timeout_seconds=SLOW)
    reference = ranks2(zoo.train, name, zoo.KINDS[name].reference, True)
    assert zoo.difference(results, reference).largest < 1e-5


def _fit_after_a_failed_run(settings: Any) -> list[tuple[str, str]]:
    class FailsOnce(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 1 and not module.options.get("failed"):
                module.options["failed"] = True
                raise ZeroDivisionError("this once")

    module = Wide()
    fits = [make_trainer(settings, max_epochs=1, callbacks=[FailsOnce()]) for _ in range(2)]
    return [outcome(trainer.fit, module, loops._loader()) for trainer in fits]


@pytest.mark.usefixtures("nvme")
def test_a_module_whose_files_went_with_a_failed_run_is_not_trained_on(ranks2, tmp_path: Path) -> None:
    from lightning_zero.config import OffloadConfig

    settings = _strategy(3) | {"offload": OffloadConfig(target="nvme", path=str(tmp_path))}
    for first, (name, text) in ranks2(_fit_after_a_failed_run, settings, timeout_seconds=SLOW):
        assert first == ("ZeroDivisionError", "this once")
        assert name == "ValueError"
        assert "ckpt_path" in text
    assert list(tmp_path.iterdir()) == []


class ManyAtATime(Wide):
    """More large parameters are whole at a time than DeepSpeed has buffers for: a layer's, a list's and its own."""

    def build(self) -> None:
        self.entry = nn.Linear(zoo.WIDTH, 512)
        self.recurrent = nn.LSTM(512, 512, num_layers=2)
        self.several = nn.ParameterList(nn.Parameter(torch.randn(512, 1024) / 30) for _ in range(8))
        self.own = nn.Parameter(torch.randn(1024, 1024) / 30)
        self.head = nn.Linear(1024, zoo.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.recurrent(self.entry(x).unsqueeze(0))[0].squeeze(0)
        return self.head(sum(torch.tanh(x @ p) for p in self.several) @ self.own)


def _fit_with_few_buffers(path: str) -> list[str]:
    from lightning_zero.config import OffloadConfig

    settings = _strategy(3) | {"offload": OffloadConfig(target="nvme", path=path, buffer_count=5)}
    with pytest.raises(AssertionError) as caught:
        make_trainer(settings, max_epochs=1).fit(ManyAtATime(), loops._loader())
    return caught.value.__notes__


@pytest.mark.usefixtures("nvme")
def test_parameters_in_files_are_read_as_many_as_are_needed(ranks2, tmp_path: Path) -> None:
    from lightning_zero.config import OffloadConfig

    settings = _strategy(3) | {"offload": OffloadConfig(target="nvme", path=str(tmp_path))}
    results = ranks2(_train_wide, settings, None, None, 1, ManyAtATime, timeout_seconds=SLOW)
    reference = ranks2(_train_wide, "ddp", None, None, 1, ManyAtATime)
    for result, expected in zip(results, reference, strict=True):
        assert loops._close(result["losses"], expected["losses"])
        assert loops._close(result["weights"], expected["weights"])
    for notes in ranks2(_fit_with_few_buffers, str(tmp_path), timeout_seconds=SLOW):
        assert any("offload.buffer_count" in note and "raise it (now 5)" in note for note in notes)


class _OwnBackward(torch.autograd.Function):
    """Looks at a parameter as torchdiffeq's ``odeint_adjoint`` does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        ctx.p = p
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] + torch.as_strided(ctx.p, (), ()), None


class LooksInItsBackward(zoo.Zoo):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.head(_OwnBackward.apply(self.net.stem(x), self.net.blocks[0].up.weight))


def _notes_of_own_backward() -> list[str]:
    with pytest.raises(RuntimeError, match="storage of size 0") as caught:
        make_trainer(_strategy(3), max_epochs=1).fit(LooksInItsBackward(), loops._loader())
    return caught.value.__notes__


def test_a_parameter_read_in_an_own_backward_is_an_error_that_says_what_to_do(ranks2) -> None:
    for notes in ranks2(_notes_of_own_backward):
        assert any("odeint_adjoint" in note and "use stage=2 or engine='fsdp2'" in note for note in notes)


@pytest.mark.usefixtures("nvme")
def test_nvme_refuses_optimizers_that_need_whole_tensors(ranks2) -> None:
    for name, text in ranks2(outcome, _fit_wide_with_adafactor, timeout_seconds=SLOW):
        assert name == "ValueError"
        assert "Adafactor" in text
        assert "offload='cpu'" in text


def _fit_wide_with_adafactor() -> None:
    class Adafactors(Wide):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters())

    trainer = make_trainer(_strategy(3, offload="nvme"), max_epochs=1)
    trainer.fit(Adafactors(), loops._loader())


# -- precision -------------------------------------------------------------------------------------------------------


def _in_precision(strategy: Any, precision: str) -> tuple[list[float], set[str]]:
    module = zoo.make_module("adam")
    make_trainer(strategy, precision=precision, max_epochs=1, limit_val_batches=0).fit(module, loops._loader())
    return list(module.losses), {str(p.dtype) for p in module.parameters()}  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(
    ("precision", "stage"), [("bf16-mixed", 1), ("bf16-true", 3), _full("bf16-mixed", 3), _full("bf16-true", 1)]
)
def test_low_precision_is_ddps(precision: str, stage: int, ranks2) -> None:
    """Losses differ by bf16's rounding at most: ``bf16-true`` steps on fp32 masters, DDP on the bf16 weights."""
    reference = ranks2(_in_precision, "ddp", precision)
    results = ranks2(_in_precision, _strategy(stage), precision, timeout_seconds=SLOW)
    for (losses, dtypes), (expected, expected_dtypes) in zip(results, reference, strict=True):
        assert dtypes == expected_dtypes
        assert losses == pytest.approx(expected, rel=2**-7)


def _future_warnings(strategy: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zoo.train("adam", strategy)
    return [str(each.message) for each in caught if issubclass(each.category, FutureWarning)]


@pytest.mark.parametrize("stage", [3, _full(1), _full(2)])
def test_no_warning_of_names_that_torch_gives_up(stage: int, ranks2) -> None:
    """DeepSpeed uses them dozens of times in a run; nothing is filtered, so the user's own warnings are seen."""
    assert ranks2(_future_warnings, _strategy(stage), timeout_seconds=SLOW) == [[], []]
