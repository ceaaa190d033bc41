"""Where every tensor lies under ``offload="cpu"`` on an accelerator, and what is copied, without one.

The engine runs on :mod:`tests.helpers.pretend`: no values, real devices. An operator over both memories raises, so each
run is a test of all its operators; a tensor in the wrong memory is named. ``tests/gpu`` repeats it with values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_zero import ZeroStrategy
from lightning_zero.comm.shards import PIECE_BYTES, to_host
from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.engines.forwards import OnHost
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.engine import Fsdp2Engine
from lightning_zero.engines.precision import DtypePolicy
from tests.helpers import pretend, zoo
from tests.helpers.ranks import RankPool, outcome

MIXED = DtypePolicy(torch.bfloat16, torch.float32)
RANKS = 2
STAGES = [(1, False), (2, True), (3, True)]
"""And whether it computes in bfloat16."""


class Module(nn.Module):
    """Blocks, a replicated scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.Net()
        self.scalar = nn.Parameter(torch.zeros(()))
        self.register_buffer("shift", torch.zeros(zoo.WIDTH))
        self.penalized = False
        self.look: Any = None

    def training_step(self, x: Tensor) -> Tensor:
        loss = (self.net(x) + self.shift).float().square().mean() + self.scalar
        if self.penalized:
            loss = loss + sum(p.float().norm() for p in self.parameters())
        if self.look is not None:
            self.look()
        return loss


def _engine(device: torch.device, stage: int, mixed: bool, offload: Any = pretend.OFFLOAD) -> Fsdp2Engine:
    with device:
        module = Module()
    config = ZeroConfig(stage=stage, offload=offload, min_unit_numel=1, find_unused_parameters=False)
    engine = Fsdp2Engine(config, device, MIXED if mixed else DtypePolicy())
    engine.shard(module)
    engine.keep_gathered = True
    return engine


def _train(engine: Fsdp2Engine, optimizer: torch.optim.Optimizer, micro_batches: int = 2) -> dict[str, Any]:
    """One optimizer step; what is held at its moments, and the bytes copied."""
    found: dict[str, Any] = {}
    with pretend.Copies() as copies:
        for index in range(micro_batches):
            last = index == micro_batches - 1
            with nullcontext() if last else engine.no_sync():
                loss = engine.run("training_step", torch.randn(4, zoo.WIDTH, device=engine.device))
                engine.backward(loss.backward)
        found["before step"] = engine.model_state([optimizer]).here
        found["up"], found["down"] = copies.up, copies.down
    engine.clip_grad_norm(optimizer, 1.0)
    engine.clip_grad_value(optimizer, 1.0)
    engine.step(optimizer)
    with engine.view():
        optimizer.zero_grad()
    found["between"] = engine.model_state([optimizer]).here
    return found


def _sharded(engine: Fsdp2Engine) -> list[DTensor]:
    return list(engine.shards.values())


def _part(engine: Fsdp2Engine, state: Any) -> Any:
    """This rank's part of an optimizer's state, which user code sees as a full tensor on the device."""
    part = engine._store.states.part_of(state)
    return state if part is None else part


def _where(engine: Fsdp2Engine, optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """The memories in which shards, their states and replicated parameters really lie."""
    states = [(name, _part(engine, v)) for p in engine.shards for name, v in optimizer.state[p].items()]
    return {
        "shards": {pretend.where(p) for p in _sharded(engine)},
        "states": {pretend.where(value) for _, value in states if isinstance(value, Tensor)},
        "kinds": {type(value).__name__ for name, value in states if name.startswith("exp")},
        "replicated": {pretend.where(engine.module.scalar)},
        "buffers": {pretend.where(b) for b in engine.module.buffers()},
    }


def _steps() -> dict[tuple[int, bool], Any]:
    results = {}
    with pretend.accelerator(RANKS) as device:
        for stage, mixed in STAGES:
            engine = _engine(device, stage, mixed)
            optimizer = torch.optim.AdamW(engine.module.parameters())
            _train(engine, optimizer)
            step = _train(engine, optimizer)
            numels = [sum(p.numel() for p in _padded(engine, u.parameters)) for u in engine._sharded.plan.units]
            # the root's and the last block's are gathered once for forward and backward
            sizes = {"sharded": sum(numels), "replicated": 1, "kept": sum(numels[-2:])}
            results[stage, mixed] = (step, sizes, _where(engine, optimizer))
    return results


def _padded(engine: Fsdp2Engine, names: Any) -> list[Tensor]:
    """This rank's parts of the parameters of these names."""
    parameters = dict(engine.module.named_parameters())
    return [engine.shards[parameters[name]]._local_tensor for name in names]


@pytest.fixture(scope="module")
def rank() -> Iterator[Any]:
    """A process for the pretended device, which PyTorch cannot forget again."""
    with RankPool() as pool:
        yield partial(pool.run, world_size=1)


@pytest.fixture(scope="module")
def steps(rank) -> Any:
    return rank(_steps)[0]


@pytest.mark.parametrize(("stage", "mixed"), STAGES)
def test_between_steps_only_what_is_replicated_is_on_the_device(steps, stage, mixed):
    step, sizes, where = steps[stage, mixed]
    assert where == {
        "shards": {"host"},
        "states": {"host"},
        "kinds": {"DTensor"},
        "replicated": {"device"},
        "buffers": {"device"},
    }
    between, counters = step["between"], 4 * 22  # fp32 step counters of the sharded parameters
    assert between["parameters"] == {"device": 4 * sizes["replicated"], "host": 4 * sizes["sharded"], "disk": 0}
    assert between["gradients"] == {"device": 0, "host": 0, "disk": 0}
    assert between["optimizer"]["host"] == 8 * sizes["sharded"] + counters
    assert between["optimizer"]["device"] == 8 * sizes["replicated"] + 4
    before = step["before step"]
    assert before["gradients"] == {"device": 4 * sizes["replicated"], "host": 4 * sizes["sharded"], "disk": 0}
    assert before["parameters"] == between["parameters"]


@pytest.mark.parametrize(("stage", "mixed"), STAGES)
def test_what_is_copied(steps, stage, mixed):
    """Two micro-batches: master weights up at each gather, gradient shards down at each reduction, in fp32."""
    step, sizes, _ = steps[stage, mixed]
    gathered = sizes["sharded"] if stage < 3 else 4 * sizes["sharded"] - 2 * sizes["kept"]
    reductions = 1 if stage == 1 else 2
    assert step["down"] == 4 * sizes["sharded"] * reductions
    assert step["up"] == 4 * gathered


def copied() -> dict[tuple[int, bool, int], tuple[float, float]]:
    """``(stage, mixed, micro-batches) -> (up, down)``, bytes per parameter of this rank's share (docs/offload.md)."""
    found = {}
    with pretend.accelerator(RANKS) as device:
        for stage in (1, 2, 3):
            for mixed, micro_batches in ((False, 1), (False, 4), (True, 1), (True, 4)):
                engine = _engine(device, stage, mixed)
                optimizer = torch.optim.AdamW(engine.module.parameters())
                _train(engine, optimizer, 1)  # tells which unit runs last
                step = _train(engine, optimizer, micro_batches)
                share = sum(p._local_tensor.numel() for p in _sharded(engine))
                found[stage, mixed, micro_batches] = (step["up"] / share, step["down"] / share)
    return found


def _reads_and_writes() -> dict[str, Any]:
    """What user code meets in hooks, and every other use of whole tensors."""
    found: dict[str, Any] = {}
    with pretend.accelerator(RANKS) as device:
        engine = _engine(device, 3, mixed=True)
        module: Any = engine.module
        p = module.net.head.weight
        with engine.view():
            found["device"] = (p.device.type, torch.zeros_like(p).device.type, (p + 1).device.type)
            with torch.no_grad():
                p.mul_(torch.ones((), device=device))
                p.copy_(torch.ones(p.shape, device=device))
                p.data = torch.ones(p.shape, device=device)
                torch.nn.init.orthogonal_(p)  # not element-wise
                torch._foreach_mul_([p, module.net.stem.weight], torch.ones((), device=device))
            optimizer = torch.optim.AdamW([p for p in module.parameters() if p.dim() == 2])
            module.penalized = True
            engine.run("training_step", torch.randn(4, zoo.WIDTH, device=device))
            engine.reshard()
            module.penalized = False  # autograd does not cross memories here: see test_offload's and tests/gpu
            loss = engine.run("training_step", torch.randn(4, zoo.WIDTH, device=device))
            engine.backward(loss.backward)
        found["gradients"] = {pretend.where(q.grad) for q in _sharded(engine) if q.grad is not None}
        engine.step(optimizer)
        found["states"] = {pretend.where(_part(engine, v)) for s in optimizer.state.values() for v in s.values()}
        state = engine.full(engine.sharded_optimizer_state(optimizer))
        found["saved"] = {pretend.where(v) for s in state["state"].values() for v in s.values()}
        fresh = torch.optim.AdamW([p for p in module.parameters() if p.dim() == 2])
        engine.load_optimizer_state(fresh, state)
        found["loaded"] = {pretend.where(_part(engine, v)) for s in fresh.state.values() for v in s.values()}
        found["shards"] = {pretend.where(q) for q in _sharded(engine)}
    return found


def test_reads_lie_on_the_device_and_writes_reach_the_host(rank):
    found = rank(_reads_and_writes)[0]
    assert found.pop("device") == (pretend.NAME,) * 3
    assert all(places == {"host"} for places in found.values()), found


def _into_one_file(offload: Any) -> set[str]:
    """Where the tensors of one file lie on rank 0; sending to one rank raises."""
    with pretend.accelerator(RANKS) as device:
        engine = _engine(device, 3, mixed=True, offload=offload)
        engine.backward(engine.run("training_step", torch.randn(4, zoo.WIDTH, device=device)).backward)
        optimizer = torch.optim.AdamW(engine.module.parameters())
        engine.step(optimizer)
        states = [engine.sharded_state_dict(), engine.sharded_optimizer_state(optimizer)["state"]]
        refused = mock.Mock(side_effect=AssertionError("a communicator of NCCL's for each pair"))
        with ExitStack() as stack:
            for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv"):
                stack.enter_context(mock.patch.object(dist, name, refused))
            files = [engine.full(state, on_rank_0=True) for state in states]
        return {pretend.where(t) for t in tree_leaves(files) if isinstance(t, Tensor)}


@pytest.mark.parametrize("offload", [pretend.OFFLOAD, "none"], ids=["offloaded", "on the device"])
def test_one_file_is_gathered_on_the_device_and_held_by_the_host(offload, rank):
    assert rank(_into_one_file, offload)[0] == {"host"}


def _intercepted() -> tuple[int, set[Any]]:
    with pretend.accelerator(RANKS) as device:
        engine = _engine(device, 3, False)
        optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
        engine.attach([optimizer], {})
        loss = engine.run("training_step", torch.randn(4, zoo.WIDTH, device=device))
        engine.backward(loss.backward)
        with engine.view(), mock.patch.object(engine.residency, "call", wraps=engine.residency.call) as call:
            engine.broadcast_buffers()
            optimizer.zero_grad()
            count = call.call_count
            return count, {p.grad for p in engine.module.parameters()}


def test_engine_code_between_steps_is_not_taken_for_user_code(rank):
    """Residency looks at each call of user code, which takes microseconds: buffers and gradients are many."""
    assert rank(_intercepted)[0] == (0, {None})


def _leaves() -> tuple[str, int, int]:
    with pretend.accelerator(RANKS) as device, pretend.Copies() as copies:
        values = torch.empty(3 * PIECE_BYTES // 8 + 3, device=device)  # one and a half pieces
        return pretend.where(to_host(values)), copies.down, values.nbytes


def test_a_large_tensor_leaves_the_device_once(rank):
    where, copied, nbytes = rank(_leaves)[0]
    assert where == "host"
    assert copied == nbytes


class _Stream:
    """Notes the events that are recorded on it, and which it waits for."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def record_event(self) -> object:
        self._seen.append(event := object())
        return event

    def wait_event(self, event: Any) -> None:
        if any(event is each for each in self._seen):
            self._seen.append("waits")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def _tell_of_gathers(group: Any, seen: list[Any]) -> None:
    unshard = group.unshard

    def gather(async_op: bool = False) -> None:
        if group.is_sharded and group._all_gather_result is None:
            seen.append("gathers")
        unshard(async_op)

    group.unshard = gather


def _write_in_a_step() -> list[str]:
    with pretend.accelerator(RANKS) as device:
        engine = _engine(device, 3, False, OffloadConfig())
        seen: list[Any] = []
        comm = private.comm_context(engine.root)
        comm.all_gather_copy_in_stream = _Stream(seen)
        comm.device_handle = mock.Mock(current_stream=lambda: _Stream(seen))
        for unit in engine.units:
            for group in private.groups(unit):
                _tell_of_gathers(group, seen)
        module: Any = engine.module

        def write() -> None:
            with torch.no_grad():
                module.net.blocks[1].up.bias.mul_(2)
            seen.append("has written")

        module.look = write
        with engine.view():
            loss = engine.run("training_step", torch.randn(4, zoo.WIDTH, device=device))
            engine.backward(loss.backward)
        return [each if isinstance(each, str) else "recorded" for each in seen]


def test_a_gather_waits_for_a_write_in_the_middle_of_a_step(rank):
    """The write is queued on the stream that computes, the gather copies shards in on another."""
    seen = rank(_write_in_a_step)[0]
    after = seen[seen.index("has written") :]
    assert after.index("recorded") < after.index("waits") < after.index("gathers")


def _manual_steps() -> list[str]:
    """Two in one ``training_step``."""
    with pretend.accelerator(RANKS) as device:
        engine = _engine(device, 3, False, OffloadConfig())
        engine.automatic = False
        optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
        engine.attach([optimizer], {})
        seen: list[str] = []
        comm = private.comm_context(engine.root)
        comm.all_gather_copy_in_stream = mock.Mock(wait_stream=lambda stream: seen.append("waits for all"))
        for group in (group for unit in engine.units for group in private.groups(unit)):
            _tell_of_gathers(group, seen)
        module: Any = engine.module

        def manual(x: Tensor) -> None:
            for _ in range(2):
                loss = module.training_step(x)
                engine.backward(loss.backward)
                seen.append(f"held: {comm.all_gather_state is not None}")
                engine.step(optimizer)
                seen.append("stepped")

        module.manual = manual
        engine.run("manual", torch.randn(4, zoo.WIDTH, device=device))
        return seen


def test_gathers_of_manual_optimization_travel_beside_compute(rank):
    """They wait for all that is queued once after each step, before the first of them."""
    seen = rank(_manual_steps)[0]
    end = seen.index("stepped") + 1
    assert len(seen) == 2 * end
    for step in (seen[:end], seen[end:]):
        assert step.count("waits for all") == 1
        assert "gathers" in step[step.index("waits for all") :]
        assert "held: False" in step


def _kept_on_the_host() -> dict[str, Any]:
    with pretend.accelerator(RANKS) as device:
        on_host = OnHost(device)
        on_host._module = mock.Mock(wraps=on_host._module)  # tells what is asked of the device's own
        x = torch.randn(4, 8, device=device, requires_grad=True) * 2
        weight = nn.Parameter(torch.randn(8, 8, device=device))
        with pretend.Copies() as copies:
            with on_host:
                loss = torch.mm(x, weight).sum()
            loss.backward()
        asked = [name for name, *_ in on_host._module.method_calls]
        kept = on_host.pack_hook(x)
        x.add_(1)
        written = outcome(on_host.unpack_hook, kept)  # here, as this device's backward cannot raise
        return {"copied": (copies.down, copies.up), "asked": asked, "written": written}


def test_activations_are_kept_in_host_memory_by_copies_beside_compute(rank):
    """A write to a kept tensor is refused, as without hooks: on a stream of its own the copy might come after it."""
    found = rank(_kept_on_the_host)[0]
    nbytes = 4 * 8 * 4  # the input; the weight stays on the device
    assert found["copied"] == (nbytes, nbytes)
    assert found["asked"] == ["current_stream", "stream", "stream", "current_stream", "current_stream"]
    assert "written to in place" in found["written"][1]


def _reduced() -> tuple[list[str], str]:
    with pretend.accelerator(RANKS) as device:
        strategy = ZeroStrategy(parallel_devices=[device], cluster_environment=LightningEnvironment())
        with mock.patch.object(dist, "all_reduce") as all_reduce:
            result = strategy.reduce(torch.ones(()))
        return [pretend.where(call.args[0]) for call in all_reduce.call_args_list], pretend.where(result)


def test_logged_host_tensors_are_reduced_on_the_device(rank):
    """``self.log(cpu_tensor, sync_dist=True)``: gloo has no mean, and a group of NCCL alone takes no host memory."""
    assert rank(_reduced) == [(["device"], "host")]
