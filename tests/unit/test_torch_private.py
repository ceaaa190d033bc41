"""Tells when a private part of PyTorch that we touch has moved: each is used here as the package uses it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from lightning_zero.comm import direct, meter
from lightning_zero.errors import MovedError
from lightning_zero.private import torch as private
from lightning_zero.private.check import check


@pytest.fixture
def world_of_one(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_table() -> None:
    check(private.TORCH)


def test_meshes_are_forgotten(world_of_one) -> None:
    """Or operators give their results the mesh, and so the process groups, of an earlier run."""
    meshes = []
    for forgets in (False, False, True):
        if forgets:
            private.forget_meshes()
        meshes.append(dist.init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
        shard = DTensor.from_local(torch.ones(2), meshes[-1], [Shard(0)])
        assert torch.zeros_like(shard).device_mesh is (meshes[-1] if forgets else meshes[0])


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_are_off() -> None:
    with _Seen() as seen:
        with private.DisableTorchFunction():
            torch.ones(1) + 1
        assert not seen.functions
        torch.ones(1) + 1
        assert seen.functions


def test_modes_of_a_kind_are_off() -> None:
    """And the others in their order, also after an error."""

    class Other(_Seen):
        pass

    with Other() as below, _Seen() as seen, Other() as above:
        with pytest.raises(KeyError), private.without_modes(_Seen):
            raise KeyError
        with private.without_modes(Other):
            torch.ones(1) + 1
        assert [len(each.functions) for each in (below, seen, above)] == [0, 2, 0]
        torch.ones(1) + 1
        assert [len(each.functions) for each in (below, seen, above)] == [2, 4, 2]
        assert torch._C._len_torch_function_stack() == 3
    assert torch._C._len_torch_function_stack() == 0


def test_torch_looks_a_class_up_at_each_call(world_of_one: None) -> None:
    """A parameter may change its class, and a class its ``__torch_function__``, while they are in use."""
    assert private.torch_function_of(DTensor) is private.torch_function_of(nn.Parameter)
    assert private.torch_function_of(DTensor) is private.disabled_torch_function

    class Guarded(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "asked"

    p: Any = nn.Parameter(torch.ones(2))
    shard = DTensor.from_local(torch.ones(2), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
    p.__class__ = Guarded
    private.set_torch_function(DTensor, lambda *unused: "asked of a shard")
    try:
        assert (torch.ones(2) + p, p.grad, torch.stack([p])) == ("asked",) * 3
        assert shard + 1 == "asked of a shard"
        with private.DisableTorchFunctionSubclass():
            assert type(p + 1) is Tensor
    finally:
        private.set_torch_function(DTensor, private.disabled_torch_function)
        p.__class__ = nn.Parameter
    assert type(torch.ones(2) + p) is Tensor
    assert type(shard + 1) is DTensor


def test_what_was_compiled_is_known() -> None:
    """Also where its backend has not run; what Dynamo is told to leave alone does not count."""
    torch._dynamo.reset()
    torch.compiler.disable(lambda: None)
    assert not private.has_compiled()
    torch.compile(lambda x: x, backend="eager")
    assert private.has_compiled()
    torch._dynamo.reset()


def test_a_backward_is_known() -> None:
    x, seen = torch.ones(1, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(private.in_backward()))
    assert not private.in_backward()
    y.backward()
    assert seen == [True]


def test_getters_are_what_modes_meet() -> None:
    p = nn.Parameter(torch.ones(1))
    with _Seen() as seen:
        private.backward_hooks(p)
        private.version_of(p)
    assert tuple(seen.functions) == private.GETTERS


def test_versions_bases_and_hooks() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    before = private.version_of(p)
    with torch.no_grad():
        p[0].add_(1)
    assert private.version_of(p) == before + 1
    assert private.base_of(p) is None
    assert private.base_of(p[0]) is p
    assert not private.backward_hooks(p)
    assert not private.has_accumulation_hooks(p)
    p.register_hook(hook := lambda grad: grad)
    p.register_post_accumulate_grad_hook(lambda p: None)
    assert list((private.backward_hooks(p) or {}).values()) == [hook]
    assert private.has_accumulation_hooks(p)


def test_who_lies_in_a_storage() -> None:
    p = nn.Parameter(torch.zeros(3, 2))
    assert private.users_of(p.untyped_storage()) == 1
    held = p.data.view(-1)
    storage = p.untyped_storage()
    assert private.users_of(storage) > 1
    del held
    assert private.users_of(storage) == 1


def test_shards_themselves(world_of_one) -> None:
    mesh = dist.init_device_mesh("cpu", (1,))
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    assert private.local_tensor(sharded).data_ptr() == sharded.to_local().data_ptr()
    private.set_local_tensor(sharded, part := torch.zeros(2))
    assert sharded.to_local().data_ptr() == part.data_ptr()


def test_modules_tables() -> None:
    module = nn.BatchNorm1d(2)
    assert isinstance(module, private.BatchNorm)
    assert private.own_parameters(module).keys() == {"weight", "bias"}
    parameters, buffers, children = private.module_tables(module)
    assert parameters is private.own_parameters(module)
    assert (set(buffers), set(children)) == ({"running_mean", "running_var", "num_batches_tracked"}, set())
    assert any(value is buffers for value in vars(module).values())
    private.own_parameters(module)["bias"] = None
    assert module.bias is None
    private.set_own_parameters(module, {"weight": module.weight})
    assert not hasattr(module, "bias")


class _Wrapped(Tensor):
    __torch_function__ = private.disabled_torch_function  # type: ignore[assignment]
    met: list[Any]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls.met.append(func)
        return func(*(torch.ones(a.shape) if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def test_wrapper_subclasses_meet_operators() -> None:
    _Wrapped.met = []
    tensor = private.wrapper_subclass(_Wrapped, torch.Size((2,)), torch.float32, torch.device("cpu"))
    assert (type(tensor), tensor.shape, tensor.dtype) == (_Wrapped, (2,), torch.float32)
    assert (tensor + 1).tolist() == [2.0, 2.0]
    (add,) = _Wrapped.met
    assert not private.schema_of(add).is_mutable
    assert private.schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert private.schema_of(torch.ops.aten.add_.Tensor).arguments[0].alias_info.is_write
    assert private.overload_packet(add) is torch.ops.aten.add


def test_item_under_fake_tensors() -> None:
    class Answers(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return 5.0 if func is private.ITEM else func(*args, **(kwargs or {}))

    with private.FakeTensorMode(allow_non_fake_inputs=True):
        tensor = torch.ones(3)
        with Answers():
            assert tensor.sum().item() == 5.0


def test_trees() -> None:
    tree = {"a": [1, (2, 3)]}
    leaves, spec = private.pytree.tree_flatten(tree)
    assert leaves == private.pytree.tree_leaves(tree) == [1, 2, 3]
    assert private.pytree.tree_unflatten([4, 5, 6], spec) == {"a": [4, (5, 6)]}
    assert private.pytree.tree_map(lambda x: -x, tree) == {"a": [-1, (-2, -3)]}


def test_callbacks_come_when_a_backward_ends() -> None:
    order = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    x.register_hook(lambda grad: order.append("x"))
    y.register_hook(lambda grad: private.at_end_of_backward(lambda: order.append("end")))
    y.sum().backward()
    assert order == ["x", "end"]


def test_hooks_on_saved_tensors_are_known() -> None:
    assert not private.saves_elsewhere()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert private.saves_elsewhere()
    assert not private.saves_elsewhere()


def test_process_groups_are_aborted(world_of_one) -> None:
    private.abort_process_groups()
    assert not dist.is_initialized()


def test_loss_scales_and_what_unscaling_finds() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert private.loss_scale(scaler) is None
    private.set_loss_scale_on(scaler, torch.device("cpu"))
    scale = private.loss_scale(scaler)
    assert scale is not None
    assert scale.item() == 8.0
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    ((device, flag),) = private.found_inf(scaler, optimizer).items()
    assert (device.type, flag.item()) == ("cpu", 0.0)
    flag.fill_(1.0)  # another rank's finding
    private.set_found_inf(scaler, optimizer, {device: flag.clone()})
    scaler.step(optimizer)
    assert p.tolist() == [1.0, 1.0]  # skipped
    scaler.update()
    assert private.loss_scale(scaler) == 4.0


def test_names_in_an_index_are_found_there(world_of_one, tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "data", no_dist=True)
    index = (tmp_path / "data" / ".metadata").read_bytes()
    metadata = pickle.loads(index)
    assert {type(info) for info in metadata.storage_data.values()} == {private.StorageInfo}
    properties = next(iter(metadata.state_dict_metadata.values())).properties
    assert isinstance(properties.__getstate__()[3], private.MemoryFormats)
    assert {name for _, name in private.PICKLED if name.encode() in index} == {name for _, name in private.PICKLED}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (dist, ("broadcast",)),
        (meter.c10d, ("all_gather_single", "all_gather_into_tensor")),
        (private.functional_collectives, ("wait_tensor",)),
    ],
)
def test_traffic_that_cannot_be_counted_is_refused(module: Any, names: tuple[str, ...], monkeypatch) -> None:
    for name in names:
        monkeypatch.delattr(module, name, raising=False)
    with pytest.raises(MovedError, match=names[0]):
        meter.TrafficMeter().install()


def test_a_reduction_whose_output_comes_first_is_refused(world_of_one) -> None:
    reduce = direct.ReduceScatter(direct.Pool(), 1)
    group = dist.group.WORLD
    assert group is not None
    sent, stays = (reduce.allocate((4,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    reduce(stays, sent, group, dist.ReduceOp.AVG)
    stays, sent = (reduce.allocate((4,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    with pytest.raises(MovedError, match="output before its input"):
        reduce(stays, sent, group, dist.ReduceOp.AVG)


def test_transforms_are_torchs_own_after_the_last_run() -> None:
    """Runs may end in another order than they began in."""
    transforms = torch._functorch.apis.vmap_impl, torch._functorch.eager_transforms.grad_and_value_impl
    seen: list[int] = []
    ends = [private.translate_transformed(lambda value, i=i: (seen.append(i), value)[1]) for i in range(3)]  # type: ignore[misc]
    for left in ({1, 2}, {1}, set()):
        ends.pop(0 if len(left) != 1 else 1)()
        seen.clear()
        torch.func.vmap(torch.sin)(torch.ones(2))
        assert set(seen) == left
    assert transforms == (torch._functorch.apis.vmap_impl, torch._functorch.eager_transforms.grad_and_value_impl)
