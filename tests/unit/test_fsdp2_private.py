"""Tells when a private part of ``fully_shard`` that we touch has moved: each is used here as the engine uses it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_zero.engines.fsdp2 import private


def _world_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


def _sharded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    private.init_now(model)
    return model


def test_groups_hooks_and_gradients(tmp_path):
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        (inner,), (outer,) = private.groups(model[0]), private.groups(model)
        assert [len(list(private.registrations(g))) for g in (inner, outer)] == [2, 2]
        seen = []
        private.before_reduce(
            inner, lambda g: bool(seen.append([private.has_grad(p) for p in private.trainable(g)]) or 1)
        )
        private.before_reduce(outer, lambda g: False)  # left out
        begun = []
        private.before_backward(inner, lambda group: begun.append(private.is_gathered(group)))
        model(torch.ones(1, 4)).sum().backward()
        assert seen == [[True, True]]
        assert begun == [False]
        assert all(isinstance(p.grad, DTensor) for p in model[0].parameters())
        assert all(p.grad is None for g in [outer] for p, _ in private.registrations(g))
        assert all(private.has_grad(p) for p in private.trainable(outer))
        private.reduce_now(outer)
        assert all(p.grad is not None for p, _ in private.registrations(outer))
    finally:
        dist.destroy_process_group()


def test_hooks_are_hidden_from_dynamo_once(tmp_path, monkeypatch):
    """And not at each call, which takes longer than what they do; left is the end of the root's backward."""
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        for unit in (model[0], model):
            private.hooks_once(unit)
            for group in private.groups(unit):
                private.before_reduce(group, lambda g: True)
                private.before_backward(group, lambda g: None)
        hidden, disable = [], torch._dynamo.disable
        monkeypatch.setattr(torch._dynamo, "disable", lambda f, **more: hidden.append(f) or disable(f, **more))
        model(torch.ones(1, 4)).sum().backward()
        assert {f.__name__ for f in hidden} <= {"_root_post_backward_final_callback"}
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_parameters_are_gathered_in_place(tmp_path):
    """Twice, with a write to the shards in between, forgotten once: the copies follow, and autograd sees no write."""
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        (inner,) = private.groups(model[0])
        gathered, outside_transforms = [], []

        class Later(dist.Work):
            def __init__(self, parts, shards):
                super().__init__()
                self.pairs = list(zip(parts, shards, strict=True))

            def wait(self, *unused):
                if torch._C._are_functorch_transforms_active():
                    transform = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
                    assert torch._C._dispatch_tls_is_dispatch_key_excluded(transform)
                    outside_transforms.append(True)
                gathered.append([part.copy_(shard).numel() for (part,), shard in self.pairs])
                return True

        private.gather_in_place(inner, lambda parts, shards, process_group: Later(parts, shards))
        model[0].unshard()
        version = private.version(inner)
        for value in (1.0, 2.0):
            model[0].reshard()
            with torch.no_grad():
                for p in model[0].parameters():
                    p.to_local().fill_(value)
            model[0].unshard(async_op=True)
            private.forget_gather(inner) if value == 1.0 else inner.finalize_backward()
            assert all(not p.untyped_storage().nbytes() for p, _ in private.copies(inner))
            model[0].unshard(async_op=True)
            model(torch.ones(1, 4)).sum().backward()  # waits for it
            assert private.version(inner) == version
            model[0].unshard()
            assert [p.flatten().tolist() for p in model[0].parameters()] == [[value] * 16, [value] * 4]
        model[0].reshard()
        torch.func.vmap(model[0])(torch.ones(3, 4))
        assert outside_transforms
        assert gathered == [[16, 4]] * len(gathered)
        assert len(gathered) == 10  # 1, in each turn: forgotten, for forward and backward, looked at; and for vmap
    finally:
        dist.destroy_process_group()


def test_shards_are_kept_in_copies(tmp_path):
    """A copy is never freed, autograd sees no write to it where its shard is written, and it follows its shard."""
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        (inner,) = private.groups(model[0])
        private.gather_in_place(inner, _copied)
        assert not any(private.is_aliased(p) for p in inner.fsdp_params)
        before = [p.to_local().clone() for p in model[0].parameters()]
        private.alias_shards(inner)
        assert all(private.is_aliased(p) for p in inner.fsdp_params)
        assert all(torch.equal(p.to_local(), b) for p, b in zip(model[0].parameters(), before, strict=True))
        model(torch.ones(1, 4)).sum().backward()
        version, places = private.version(inner), [p.to_local().data_ptr() for p in model[0].parameters()]
        with torch.no_grad():
            for p in model[0].parameters():
                p.to_local().fill_(3.0)
        model[0].unshard()
        assert private.version(inner) == version
        assert [(p.data_ptr(), p.unique().tolist()) for p in model[0].parameters()] == [(a, [3.0]) for a in places]
        model[0].reshard()
        assert [private.whole_bytes(p) for p in inner.fsdp_params] == [(0, 0)] * 2  # beside the shards
        model._apply(torch.clone)  # as Module.to() does
        assert not any(private.is_aliased(p) for p in inner.fsdp_params)
        assert [private.whole_bytes(p) for p in inner.fsdp_params] == [(64, 0), (16, 0)]
        assert private.gather_for_good(inner) == {}
    finally:
        dist.destroy_process_group()


def test_what_is_gathered_for_good_is_the_copies(tmp_path):
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        (inner,) = private.groups(model[0])
        private.gather_in_place(inner, _copied)
        private.alias_shards(inner)
        shards = list(model[0].parameters())
        found = private.gather_for_good(inner)
        assert [found[p].data_ptr() for p in shards] == [p.to_local().data_ptr() for p in shards]
        assert [found[p].shape for p in shards] == [(4, 4), (4,)]
    finally:
        dist.destroy_process_group()


def _copied(parts, shards, process_group):
    for (part,), shard in zip(parts, shards, strict=True):
        part.copy_(shard)


@pytest.mark.parametrize(
    ("policy", "dtype", "is_kept"),
    [
        ({}, torch.float32, True),
        ({}, torch.bfloat16, True),
        ({}, torch.float16, False),  # divided by a part of the world size afterwards
        ({}, torch.float64, False),
        ({"param_dtype": torch.bfloat16}, torch.float32, False),  # cast afterwards
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, torch.float32, True),
    ],
)
def test_which_reductions_are_kept_as_they_are(tmp_path, policy, dtype, is_kept):
    _world_of_one(tmp_path)
    try:
        model = nn.Linear(4, 4).to(dtype)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(**policy))
        private.init_now(model)
        (group,) = private.groups(model)
        assert private.keeps_what_is_reduced(group) == is_kept
        model(torch.ones(1, 4, dtype=policy.get("param_dtype", dtype))).sum().backward()
        assert not private.keeps_what_is_reduced(group)  # the next is added
    finally:
        dist.destroy_process_group()


def test_requires_grad_follows_and_forwards_are_forgotten(tmp_path):
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        (outer,) = private.groups(model)
        model.unshard()
        assert private.is_gathered(outer)
        for sharded, _ in private.registrations(outer):
            sharded.requires_grad_(False)
        private.follow_requires_grad(outer)
        assert not any(p.requires_grad for p in model[1].parameters())
        with torch.no_grad():
            model(torch.ones(1, 4))
        private.forget_forwards(model)
        assert not model._get_fsdp_state()._comm_ctx.post_forward_order
    finally:
        dist.destroy_process_group()


def test_what_a_forward_leaves_is_noticed(tmp_path):
    """Gathered, recorded, or sent ahead: each alone is not settled."""
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        groups = [group for unit in (model[0], model) for group in private.groups(unit)]

        def settled() -> bool:
            return private.is_resharded(model, groups)

        def reshard() -> bool:
            for unit in (model[0], model):
                unit.reshard()
            private.forget_forwards(model)
            return settled()

        assert settled()
        model[0].unshard()
        assert not settled()
        assert reshard()
        model[0].unshard(async_op=True)  # on its way
        assert not settled()
        assert reshard()
        with torch.no_grad():
            model(torch.ones(1, 4))
        for unit in (model[0], model):
            unit.reshard()
        assert not settled()  # recorded
        assert reshard()
        model(torch.ones(1, 4)).sum().backward()
        assert settled()
    finally:
        dist.destroy_process_group()


def test_undo_leaves_an_ordinary_module_that_can_be_sharded_again(tmp_path):
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        for unit in (model[0], model):
            for group in private.groups(unit):
                for sharded, places in list(private.registrations(group)):
                    for module, name in places:
                        setattr(module, name, nn.Parameter(sharded.full_tensor().detach()))
            private.undo(unit)
        assert type(model) is nn.Sequential
        assert not any(isinstance(m, FSDPModule) for m in model.modules())
        assert not any("fsdp" in key for m in model.modules() for key in vars(m))
        copy.deepcopy(model)
        pickle.loads(pickle.dumps(model))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def test_hooks_follow_transforms_where_it_says_so(tmp_path):
    _world_of_one(tmp_path)
    try:
        net = _sharded()
        per_sample = torch.func.vmap(torch.func.grad(lambda x: net(x).sum()))
        if private.KNOWS_TRANSFORMS:
            assert per_sample(torch.ones(2, 4)).shape == (2, 4)
        else:
            with pytest.raises(RuntimeError):  # of torch, in words that depend on its version
                per_sample(torch.ones(2, 4))
    finally:
        dist.destroy_process_group()
