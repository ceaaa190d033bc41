"""Tells when a private part of DeepSpeed that we touch has moved: each is used here as the engine uses it.

One process is a world of one: DeepSpeed cuts, gathers and reduces all the same. What lies in files is used by
``tests/distributed/test_offload.py``; here its names are only looked for, as everybody's by ``test_the_table``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.optimizer_step import Joined
from lightning_zero.errors import MovedError
from lightning_zero.private.check import Library, Needed, check

pytest.importorskip("deepspeed")

CPU = torch.device("cpu")
STAGES = (1, 2, 3)


def config(stage: int, **zero: Any) -> dict[str, Any]:
    settings = {"stage": stage, "contiguous_gradients": False, **zero}
    if stage == 3:
        settings["stage3_param_persistence_threshold"] = 0
        settings["memory_efficient_linear"] = False  # it replaces F.linear, for good
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": settings,
    }


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


@contextlib.contextmanager
def running(stage: int, model: nn.Module | None = None, **zero: Any) -> Iterator[tuple[nn.Module, Any, Any]]:
    """``(module, DeepSpeed's engine, Shards)``, put together as ``DeepSpeedEngine.attach`` does."""
    model = plain_model() if model is None else model
    attributes = {id(p): private.own_attributes(p) for p in model.parameters()}
    deepspeed = private.prepare(CPU)
    private.count_modules_from_zero()
    private.count_parameters_from_zero()
    params = [p for p in model.parameters() if p.dim()]
    with private.partial_offload(Joined):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=Joined([params]),
            model_parameters=params,
            config=config(stage, **zero),
            dist_init_required=False,
        )
    if stage == 3:
        private.without_residency(engine, lambda: False)
    try:
        yield model, engine, (private.Shards3 if stage == 3 else private.Shards12)(engine)
    finally:
        private.end(engine, model, attributes)


def backward(stage: int, engine: Any, shards: Any, before_end: Any = lambda: None, kept: Any = ()) -> None:
    shards.before_backward(set(kept))
    if stage < 3:
        shards.before_reductions()
    engine.set_gradient_accumulation_boundary(stage < 3)
    loss = engine(torch.ones(1, 4)).square().sum()
    private.backward(engine, loss.backward, before_end)
    shards.after_backward(stage < 3)


def expected_grads(factor: float = 1.0) -> list[torch.Tensor]:
    model = plain_model()
    model(torch.ones(1, 4)).square().sum().backward()
    return [factor * p.grad for p in model.parameters()]  # type: ignore[operator]


@pytest.fixture(scope="module", autouse=True)
def _world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    with private.environment(CPU):
        yield


def test_the_table() -> None:
    check(private.DEEPSPEED)


def test_starting_checks_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Library("deepspeed", ">=0.19.8,<0.20", (Needed("deepspeed.runtime.engine:DeepSpeedEngine.gone"),))
    monkeypatch.setattr(private, "DEEPSPEED", gone)
    with pytest.raises(MovedError, match=r"DeepSpeedEngine\.gone is gone"):
        private.prepare(CPU)


def test_the_accelerator_is_the_runs() -> None:
    """Two runs of one process, on a CPU and on a GPU, in either order."""
    from deepspeed.accelerator import get_accelerator

    try:
        for kind in ("cpu", "cuda", "cpu"):
            private.use_accelerator(torch.device(kind))
            assert get_accelerator().device_name() == kind
            assert get_accelerator().communication_backend_name() == {"cpu": "gloo", "cuda": "nccl"}[kind]
    finally:
        private.use_accelerator(CPU)


def test_environment_is_for_the_start() -> None:
    before = dict(os.environ)
    with private.environment(CPU):
        assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert os.environ == before


def test_each_process_group_gets_a_backend_of_its_own() -> None:
    from deepspeed import comm

    private.prepare(CPU)
    first = comm.comm.cdb
    private.prepare(CPU)
    assert comm.comm.cdb is first
    first._lightning_zero_world = None  # as if that group had ended
    private.prepare(CPU)
    assert comm.comm.cdb is not first
    assert comm.get_world_size() == 1
    assert comm.comm.cdb.shm_comm_op is None  # not compiled
    assert import_module("deepspeed.comm.torch").build_shm_op.__module__ == "deepspeed.comm.torch"  # for others


def test_numbers_begin_anew() -> None:
    for _ in range(2):
        with running(3) as (model, _, _):
            assert [private.number_of(p) for p in model.parameters()] == [0, 1, 2, 3]
            assert sorted(private.number_of(m) for m in model.modules()) == [0, 1, 2]


def test_partial_offload_is_admitted_for_a_while() -> None:
    from deepspeed.runtime.zero import stage3

    before = stage3.DeepSpeedCPUAdam
    with private.partial_offload(Joined):
        assert stage3.DeepSpeedCPUAdam is Joined
    assert stage3.DeepSpeedCPUAdam is before


def test_built_sharded() -> None:
    """Inside, layers are sharded at their end; parameters that cannot lie in a flat stay."""
    private.prepare(CPU)
    private.count_parameters_from_zero()

    class WithScalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.linear = nn.Linear(4, 3)

    sharded: list[Any] = []
    with private.sharding(config(3), sharded.append):
        model = WithScalar()
    weight = model.linear.weight
    assert {*map(id, sharded)} == {id(weight), id(model.linear.bias)}
    weight.mine = 1  # type: ignore[attr-defined]
    assert not private.is_managed(model.scalar)
    assert private.is_managed(weight)
    assert private.is_partitioned(weight)
    assert (private.whole_shape(weight), private.whole_numel(weight)) == ((3, 4), 12)
    assert (private.whole_shape(model.scalar), private.whole_numel(model.scalar)) == ((), 1)
    assert private.own_attributes(weight) == {"mine"}
    assert private.is_late("ds_tensor")
    assert not private.is_late("mine")
    cut = private.cut_of(weight)
    assert cut is not None
    assert cut.numel() == 12
    value = torch.arange(12.0).reshape(3, 4)
    weight.data = value
    private.store_part(weight)
    private.empty(weight)
    assert private.is_partitioned(weight)
    assert weight.numel() == 0
    assert torch.equal(private.gathered_copy(weight), value)
    weight.data = weight.data.double()  # as module.to() does to what is there
    private.keep_dtype(weight)
    cut = private.cut_of(weight)
    assert cut is not None
    assert cut.dtype == torch.float64
    private.make_whole(weight)
    assert not private.is_managed(weight)
    assert torch.equal(weight, value.double())
    assert vars(weight) == {"mine": 1}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("offload", [False, True])
def test_backwards(stage: int, offload: bool) -> None:
    """Gradients are this rank's parts, replaced or added to; each comes before DeepSpeed takes it."""
    zero: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    with running(stage, **zero) as (model, engine, shards):
        params, seen, ends = list(model.parameters()), [], []

        def arrives(p: torch.Tensor) -> None:
            seen.append(p.grad is not None)
            give(p)

        give = private.take_gradients(engine, arrives)
        backward(stage, engine, shards, lambda: ends.append(len(seen)))
        for p, expected in zip(params, expected_grads(), strict=True):
            torch.testing.assert_close(shards.grad(p), expected.flatten())
        assert sum(t.numel() for t in shards.grad_buffers()) >= 12 + 3 + 6 + 2
        backward(stage, engine, shards, kept=params)
        for p, expected in zip(params, expected_grads(2.0), strict=True):
            torch.testing.assert_close(shards.grad(p), expected.flatten())
        assert all(seen)  # none at stage 1 where nothing overlaps: DeepSpeed looks for them at the end
        assert ends == [len(seen) // 2]


@pytest.mark.parametrize("stage", STAGES)
def test_zeros_are_reduced_with_the_others(stage: int) -> None:
    with running(stage) as (model, engine, shards):
        give = private.take_gradients(engine, lambda p: give(p))

        def before_end() -> None:
            for p in list(model.parameters())[2:]:
                private.give_zeros(p)
                assert p.grad is not None
                assert p.grad.shape == private.whole_shape(p)
                give(p)

        shards.before_backward(set())
        engine.set_gradient_accumulation_boundary(stage < 3)
        private.backward(engine, model[0](torch.ones(1, 4)).sum().backward, before_end)  # type: ignore[operator]
        shards.after_backward(stage < 3)
        params = list(model.parameters())
        assert all(not shards.grad(p).any() for p in params[2:])
        assert all(shards.grad(p).any() for p in params[:2])


@pytest.mark.parametrize("stage", STAGES)
def test_masters_and_weights(stage: int) -> None:
    with running(stage) as (model, _, shards):
        for p, expected in zip(model.parameters(), plain_model().parameters(), strict=True):
            piece = shards.pieces[p]
            assert isinstance(piece, private.Piece)
            assert torch.equal(piece.of(shards.master(piece.flat)), expected.flatten())
            assert torch.equal(piece.of_whole(expected), expected.flatten())
            assert torch.equal(private.gathered_copy(p), expected)
            with torch.no_grad():
                piece.of(shards.master(piece.flat)).fill_(7.0)
            shards.publish([piece.flat])
            assert torch.equal(private.gathered_copy(p), torch.full_like(expected, 7.0))
            with torch.no_grad():
                if stage == 3:
                    p.data = torch.full_like(expected, 8.0)
                    private.store_part(p)
                else:
                    p.fill_(8.0)
            shards.adopt(p)
            assert piece.of(shards.master(piece.flat)).unique().tolist() == [8.0]


def test_stage_3_says_what_it_reduces_and_gathers() -> None:
    with running(3) as (model, engine, shards):
        reduced: list[int] = []
        gathered: list[nn.Module] = []
        private.before_buckets(engine, reduced.extend)
        private.before_gathers(engine, gathered.append)
        backward(3, engine, shards)
        assert sorted(reduced) == [0, 1, 2, 3]
        assert gathered == [model[0], model[1]]  # type: ignore[index]


def test_who_comes_last_is_asked_first_before_a_module() -> None:
    """Also of modules without parameters of their own; all else that stage 3 does comes after."""
    with running(3) as (model, engine, _):
        seen: list[tuple[str, nn.Module]] = []
        private.before_modules(engine, lambda module: seen.append(("first", module)))
        private.before_modules(engine, lambda module: seen.append(("last", module)))
        engine(torch.ones(1, 4))
        modules = [model, model[0], model[1]]  # type: ignore[index]
        assert seen == [(who, module) for module in modules for who in ("last", "first")]


def test_reads_wait_for_what_is_in_flight() -> None:
    """Stage 3 has sent it ahead, and the module that would wait for it has not come."""
    with running(3) as (model, engine, shards):
        (weight, bias), expected = model[0].parameters(), next(plain_model().parameters())  # type: ignore[index]
        private.expect_in_flight(engine, engine.module, (weight, bias))
        handle = weight.all_gather_coalesced([weight])  # type: ignore[attr-defined]
        weight.ds_in_flight[weight] = handle  # type: ignore[attr-defined]
        assert private.is_ahead(weight)
        assert not private.is_ahead(bias)
        assert torch.equal(private.gathered_copy(weight), expected)
        assert not engine.module.ds_inflight_param_registry
        assert not private.is_ahead(weight)
        shards.reshard()
        assert torch.equal(private.gathered_copy(bias), plain_model()[0].bias)


def test_stage_3_gathers_what_is_used_outside_its_module() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            private.fetch(self.inner.weight)
            assert not private.is_partitioned(self.inner.weight)
            return x @ self.inner.weight.T

    with running(3, Around()) as (model, engine, shards):
        weight = model.inner.weight  # type: ignore[union-attr]
        x = torch.ones(1, 4)
        shards.before_backward(set())
        give = private.take_gradients(engine, lambda p: give(p))

        def before_end() -> None:
            private.give_zeros(model.inner.bias)  # type: ignore[union-attr]
            give(model.inner.bias)  # type: ignore[union-attr]

        private.backward(engine, engine(x).sum().backward, before_end)
        shards.after_backward(False)
        assert shards.grad(weight).tolist() == [1.0] * 12
        shards.reshard()
        assert private.is_partitioned(weight)
        private.keep(weight)
        assert not private.is_partitioned(weight)
        shards.reshard()
        assert private.is_partitioned(weight)


def test_inputs_that_stage_3_gives_modules_may_be_changed() -> None:
    """And who uses one afterwards knows of it."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.activate, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(self.activate(x)) + x.sum()

    def reference(model: nn.Module) -> torch.Tensor:
        model(torch.ones(1, 4)).sum().backward()
        weight = model.first.weight
        assert isinstance(weight, torch.Tensor)
        assert weight.grad is not None
        return weight.grad

    torch.manual_seed(0)
    expected = reference(plain := Around())
    torch.manual_seed(0)
    with running(3, Around()) as (model, engine, shards):
        private.let_inputs_change(engine, engine.module)
        shards.before_backward(set())
        private.backward(engine, engine(torch.ones(1, 4)).sum().backward, lambda: None)
        shards.after_backward(False)
        grad = shards.grad(model.first.weight)  # type: ignore[union-attr]
        torch.testing.assert_close(grad.view(4, 4), expected)
    assert plain is not model


def test_while_the_module_is_whole_nothing_is_gathered() -> None:
    whole = [True]
    with running(3) as (_, engine, _):
        private.without_residency(engine, lambda: whole[0])
        with pytest.raises(RuntimeError):
            engine(torch.ones(1, 4))  # what is registered, partitioned as it is
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        FWD_MODULE_STACK.clear()
        whole[0] = False
        engine(torch.ones(1, 4))


def test_odd_parameters_are_passed_over() -> None:
    """A parameter that DeepSpeed was not given is none of its modules', for as long as it lives."""
    model = plain_model()
    with running(3, model) as (_, engine, shards):
        model.scalar = nn.Parameter(torch.tensor(2.0))
        backward(3, engine, shards)


@pytest.mark.parametrize("stage", STAGES)
def test_at_the_end_nothing_of_it_is_left(stage: int) -> None:
    model = plain_model()
    plain = plain_model()
    for p in model.parameters():
        p.mine = 1  # type: ignore[attr-defined]
    with running(stage, model) as (_, engine, shards):
        backward(stage, engine, shards)
        assert any(map(private.is_on_modules, vars(model[0]))) == (stage == 3)
        values = {p: private.gathered_copy(p).clone() for p in model.parameters()}
    for p, value in values.items():
        p.grad, p.data = None, value
    assert all(vars(p) == {"mine": 1} for p in model.parameters())
    assert not any(map(private.is_on_modules, vars(plain[0])))
    assert all(set(vars(m)) == set(vars(o)) for m, o in zip(model.modules(), plain.modules(), strict=True))
    assert all(
        type(m._parameters) is type(o._parameters) for m, o in zip(model.modules(), plain.modules(), strict=True)
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
