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
from torch.overrides import TorchFunctionMode

from lightning_zero.engines.fsdp2 import private
from lightning_zero.private.check import check


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
        begun = []
        private.hook_group(
            inner,
            private.GroupHooks(
                before_backward=lambda g: begun.append(private.is_gathered(g)),
                before_reduce=lambda g: bool(seen.append([private.has_grad(p) for p in private.trainable(g)]) or 1),
            ),
        )
        private.hook_group(outer, private.GroupHooks(before_reduce=lambda g: False))  # left out
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


@pytest.mark.parametrize(
    ("policy", "dtype", "is_kept"),
    [
        ({}, torch.float32, True),
        ({}, torch.bfloat16, True),
        ({}, torch.float16, False),  # divided by a part of the world size afterwards
        ({}, torch.float64, False),
        ({"param_dtype": torch.bfloat16}, torch.float32, not private._WAITS_APART),  # cast afterwards before 2.15
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


@pytest.fixture
def world_of_one(tmp_path):
    _world_of_one(tmp_path)
    yield
    dist.destroy_process_group()


X = torch.ones(1, 4)


def _units(model):
    return [model[0], model]


def _params(model):
    """What ``fully_shard`` knows of each parameter, the inner unit's first."""
    return [p for unit in _units(model) for group in private.groups(unit) for p in group.fsdp_params]


def _own(**policy):
    """As the engine has it: ``(model, the user's parameters, what is known of them)``, the user's own registered."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    users = dict(model.named_parameters())
    mesh = dist.init_device_mesh("cpu", (1,))
    for unit in _units(model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    originals = {p: users[name] for name, p in model.named_parameters()}
    for p in originals.values():
        p.data = p.data.new_empty(0)
    for unit in _units(model):
        private.give_class_back(unit)
    private.init_now(model)
    for unit in _units(model):
        for group in private.groups(unit):
            private.keep_registered(group, originals)
    return model, list(users.values()), _params(model)


def test_the_table():
    check(private.FULLY_SHARD)


def test_the_users_parameters_are_the_gathered_ones(world_of_one):
    """The same objects on their modules, whether their memory is there or not."""
    model, users, known = _own()
    (inner,) = private.groups(model[0])
    expected = [p.sharded_param.to_local().clone() for p in known]
    for away in (True, False, True):
        private.reshard(model[0]) if away else private.unshard(model[0])
        assert all(a is b for a, b in zip(model.parameters(), users, strict=True))
        assert [private.is_away(p) for p in inner.fsdp_params] == [away] * 2
        assert all(bool(p.untyped_storage().nbytes()) != away for p in users[:2])
    private.unshard(model[0])
    model.state_dict()
    assert private.is_gathered(inner)  # saving drops nothing
    assert all(torch.equal(a, b) for a, b in zip(users[:2], expected, strict=False))
    private.reshard(model[0])
    model(X).sum().backward()
    assert all(a is b for a, b in zip(model.parameters(), users, strict=True))
    assert all(isinstance(p.sharded_param.grad, DTensor) and users[i].grad is None for i, p in enumerate(known))
    assert not any(key.startswith("_fsdp") for p in users for key in vars(p))


def test_memory_that_is_held_stays_and_is_filled_again(world_of_one):
    model, users, known = _own()
    (inner,) = private.groups(model[0])
    home = private.Home(inner, known[0])
    private.unshard(model[0])
    assert private.others_in(home) == 0
    view = users[0].detach()
    version, expected = users[0]._version, view.clone()
    assert private.others_in(home) == 1
    private.keep_memory(known[0])
    private.reshard(model[0])
    assert torch.equal(view, expected)
    private.fill_home(known[0], torch.zeros(4, 4))
    assert not view.any()
    assert users[0]._version == version  # arriving is no write
    private.unshard(model[0])
    assert torch.equal(view, expected)
    private.reshard(model[0])
    del view
    assert private.others_in(home) == 0
    private.give_memory_up(home)
    assert not users[0].untyped_storage().nbytes()


def test_memory_that_cannot_be_given_up_is_left_to_its_holder(world_of_one):
    model, users, known = _own()
    home = private.Home(private.groups(model[0])[0], known[0])
    private.unshard(model[0])
    array = users[0].detach().numpy()
    expected = array.tolist()
    private.keep_memory(known[0])
    private.reshard(model[0])
    private.give_memory_up(home)
    private.unshard(model[0])
    assert array.tolist() == users[0].tolist() == expected
    assert array.ctypes.data != users[0].data_ptr()


def test_a_parameter_moves_to_new_memory_with_its_shard(world_of_one):
    """What was taken of it keeps the values of before."""
    model, users, known = _own()
    private.unshard(model[0])
    old = users[0].detach()
    expected = old.clone()
    private.move_home(private.Home(private.groups(model[0])[0], known[0]))
    with torch.no_grad():
        users[0].copy_(expected * 2)
    assert torch.equal(old, expected)
    private.reshard(model[0])
    assert torch.equal(old, expected)


def test_gradients_before_and_after_they_are_reduced(world_of_one):
    model, users, known = _own()
    private.unshard(model[0])
    p, (inner,) = known[0], private.groups(model[0])
    assert private.grad_of(p) is None
    private.set_whole_grad(p, torch.full((4, 4), 2.0, dtype=torch.float64))
    assert private.has_grad(p)
    assert private.grad_of(p) is users[0].grad
    assert (users[0].grad.dtype, users[0].grad.unique().tolist()) == (torch.float32, [2.0])
    private.zero_grad(known[1])
    assert users[1].grad.tolist() == [0.0] * 4
    private.reduce_now(inner)
    assert not private.has_grad(p)
    pending = getattr(inner.comm_ctx, "_last_post_reduce_events", None)  # of torch 2.13 and later
    assert not pending  # else an optimizer on a GPU may read them unreduced
    assert private.grad_of(p) is p.sharded_param.grad
    assert [each.sharded_param.grad.to_local().unique().tolist() for each in known[:2]] == [[2.0], [0.0]]
    private.set_requires_gradient_sync(_units(model), False)
    model(X).sum().backward()
    assert private.has_grad(p)
    private.drop_whole_grad(p)
    assert not private.has_grad(p)


def test_gradients_wait_for_later_ones_in_the_dtype_of_the_reduction(world_of_one):
    """Those of earlier micro-batches, each counted once; after the run gradients have the parameter's dtype again."""
    model, users, known = _own(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    private.set_requires_gradient_sync(_units(model), False)
    for times in (1, 2):
        model(X.bfloat16()).sum().backward()
        (whole,) = private._whole_grads(known[3])
        assert (whole.dtype, whole.tolist()) == (torch.float32, [times] * 4)
        assert private.whole_bytes(known[3])[1] == 16
    private.unshard(model)
    private.drop_whole_grad(known[3])
    private.zero_grad(known[3])
    private.add_whole_grad(known[3], torch.ones(4))
    private.set_requires_gradient_sync(_units(model), True)
    private.accumulate_alike(known[2:])
    private.reduce_now(private.groups(model)[0])
    assert known[3].sharded_param.grad.to_local().tolist() == [1.0] * 4
    private.set_data(users[0], torch.ones(4, 4))
    private.give_grad_dtype_back(known[0], users[0])
    assert users[0].grad_dtype == torch.float32


def test_units_change_their_inputs_in_place(world_of_one):
    """Which torch refuses with the function of fully_shard's own; and the group's part of the backward ends."""
    model = _sharded()
    model[0].register_forward_pre_hook(lambda unit, args: (args[0].mul_(2.0),))
    ended: list[object] = []
    for unit in (model[0], model):
        private.hook_unit(unit, lambda: True)
        for group in private.groups(unit):
            hooks = private.GroupHooks(before_reduce=lambda g: bool(ended.append(g)) or True)
            private.hook_group(group, hooks, is_root=unit is model)
    given = torch.ones(1, 4, requires_grad=True)
    between = given * 1.0
    model(between).sum().backward()
    assert between.tolist() == [[2.0] * 4]
    assert len(ended) == 2
    weight = model[1].weight.full_tensor() @ model[0].weight.full_tensor()
    torch.testing.assert_close(given.grad, 2.0 * weight.sum(0, keepdim=True))


def test_the_roots_part_ends_with_the_backward(world_of_one):
    """Not with the gradients of its inputs, as of a unit: the graph of these goes on."""
    for is_root in (False, True):
        model = _sharded()
        (group,) = private.groups(model)
        ended: list[bool] = []
        hooks = private.GroupHooks(before_reduce=lambda g, ended=ended: bool(ended.append(True)) or True)
        private.hook_group(group, hooks, is_root)
        between = torch.ones(1, 4, requires_grad=True) * 1.0
        begun_before: list[bool] = []
        between.register_hook(lambda grad, ended=ended, seen=begun_before: seen.append(bool(ended)))
        earlier = between * 1.0
        earlier.grad_fn.register_prehook(lambda grads, ended=ended, seen=begun_before: seen.append(bool(ended)))
        model(earlier).sum().backward()
        assert begun_before == [not is_root] * 2
        assert ended


def test_what_a_unit_writes_to_is_its_callers(tmp_path):
    """Lists, dictionaries and dataclasses among its arguments, which hold activations, are not copied."""
    _world_of_one(tmp_path)
    try:
        model = _sharded()
        private.hook_group(private.groups(model[0])[0], private.GroupHooks())
        model[0].forward = lambda x, terms, more: terms.append(x.sum()) or more.update(loss=x.mean()) or x
        x = torch.ones(1, 4, requires_grad=True)
        terms, more = [x * 2], {"x": x * 3}
        model[0](x, terms, more=more)
        assert [t.item() for t in (terms[1], more["loss"])] == [4.0, 1.0]
    finally:
        dist.destroy_process_group()


class _Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_meet_nothing_of_what_a_group_does(world_of_one):
    counts = []
    for quiet in (False, True):
        model, _, _ = _own()
        for unit in _units(model) if quiet else ():
            for group in private.groups(unit):
                private.hook_group(group, private.GroupHooks(), is_root=unit is model)
        with _Seen() as seen:
            model(X)
        counts.append(len(seen.functions))
    assert 2 <= counts[1] < counts[0]  # the two linear ones are the user's


def test_what_is_computed_outside_transforms_and_modes():
    found = []

    def function(x):
        plain = torch.zeros(())
        with private.outside_transforms():
            plain.copy_(torch.ones(()))
            found.append(torch._C._dispatch_tls_is_dispatch_key_excluded(front))
        found.append(torch._C._dispatch_tls_is_dispatch_key_excluded(front))
        return x + plain

    front = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    assert torch.func.vmap(function)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert found == [True, False]
    with _Seen() as seen, private.outside_transforms():
        torch.ones(1) + 1
    assert not seen.functions
