"""Tells when a private part of PyTorch that we touch has moved: each is used here as the package uses it."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
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


def test_no_operator_is_seen_outside_of_modes() -> None:
    """Of a selective recomputation, for one."""

    class Counts(private.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Counts() as mode:
        with private.outside_modes():
            torch.ones(1) + 1
        assert mode.seen == 0
        torch.ones(1) + 1
    assert mode.seen == 2


def test_a_mode_is_put_below_others_for_a_while() -> None:
    """As a handler of torch functions looks on, whatever modes user code is inside of."""
    with _Seen() as user, private.without_modes(_Translating):
        private.put_below(mode := _Translating())
        torch.ones(1) + 1
        assert (len(user.functions), len(mode.functions)) == (2, 2)
    torch.ones(1) + 1
    assert len(mode.functions) == 2


class _Translating(_Seen):
    pass


def test_a_mode_meets_what_a_backward_calls() -> None:
    """Hooks, too, though the mode has let the backward through."""

    class Mode(_Seen):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with private.backwards_inside(self) if func is Tensor.backward else private.EnableTorchFunction():
                return super().__torch_function__(func, types, args, kwargs)

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: torch.neg(grad))
    with _Seen() as without:
        y.backward(retain_graph=True)
    with Mode() as mode:
        y.backward()
    assert torch.neg not in without.functions
    assert mode.functions.count(torch.neg) == 1
    assert torch.autograd._engine_run_backward.__module__.startswith("torch.")


def test_the_users_code_has_its_modes_inside_ours() -> None:
    with _Seen() as seen, private.DisableTorchFunction():
        torch.neg(torch.ones(1))
        with private.EnableTorchFunction():
            torch.abs(torch.ones(1))
    assert torch.abs in seen.functions
    assert torch.neg not in seen.functions


def test_memory_is_set_past_a_parameters_class() -> None:
    class Own(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    p, value = Own(torch.zeros(1)), torch.ones(3)
    private.set_data(p, value)
    with private.DisableTorchFunctionSubclass():
        assert (p.data_ptr(), p.tolist()) == (value.data_ptr(), [1.0] * 3)


def test_hooks_of_users_come_last() -> None:
    module, order = nn.Linear(1, 1), []
    for name in ("users", "ours"):
        handle = module._register_state_dict_hook(lambda *unused, name=name: order.append(name))
    private.run_first(module, handle)
    module.state_dict()
    assert order == ["ours", "users"]


def test_what_would_be_saved_is_known() -> None:
    """By every name of what is tied, and without hooks."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[2].weight = module[1].weight
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("left", torch.ones(1), persistent=False)
    state = module.state_dict(keep_vars=True)
    found = private.saved_tensors(module)
    assert found.keys() == state.keys()
    assert all(found[name] is state[name] for name in state)
    assert found["1.weight"] is found["2.weight"]


def test_a_storage_has_a_key_of_its_own() -> None:
    first, second = torch.empty(0), torch.empty(0)
    assert first.data_ptr() == second.data_ptr() == 0
    keys = [private.storage_key(t.untyped_storage()) for t in (first, first.view(-1), second)]
    assert keys[0] == keys[1] != keys[2]
    assert StorageWeakRef(first.untyped_storage()).cdata == keys[0]


@pytest.mark.parametrize("kind", [nn.Linear, nn.MultiheadAttention, nn.Transformer, nn.LSTM, nn.LayerNorm])
def test_modules_of_torch_initialize_themselves(kind: type[nn.Module]) -> None:
    assert any(hasattr(kind, name) for name in private.INITIALIZERS)


def test_a_parameter_is_brought_beside_a_transform() -> None:
    """Within it, an autograd function without rules for transforms raises."""

    class Brings(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 2

    p, seen = torch.ones(1), []

    def function(x: Tensor) -> Tensor:
        seen.append(private.in_transform())
        with private.outside_transforms():
            seen.append(private.in_transform())
            brought = Brings.apply(p)
        with pytest.raises(RuntimeError, match="vmap"):
            Brings.apply(x)
        return x + brought

    assert torch.func.vmap(function)(torch.ones(3, 1)).tolist() == [[3.0]] * 3
    with private.outside_transforms():
        assert Brings.apply(p).item() == 2.0
    assert seen == [True, False]
    assert not private.in_transform()
    assert torch.func.vmap(lambda x: x + _inside(private.without_transforms))(torch.ones(2)).tolist() == [1.0, 1.0]


def _inside(context: Callable[[], Any]) -> int:
    with context():
        return int(private.in_transform())


def test_a_trace_is_known() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(private.in_fx_trace())
        return x + 1

    make_fx(function)(torch.ones(1))
    function(torch.ones(1))
    with private.FakeTensorMode():  # a mode of operators, too
        function(torch.ones(1))
    assert seen == [True, False, False]


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Nothing is compiled before, nor afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _counting(graphs: list[Any]) -> Callable[..., Any]:
    """A backend that keeps the graphs that it is given, and runs them as they are."""

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


def test_errors_of_dynamo(dynamo: None) -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(private.dynamo_error()):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))


def test_code_that_dynamo_gives_up_is_told_apart(dynamo: None) -> None:
    """Without an error; code in which a graph only breaks is compiled in parts."""

    def breaks_in_a_loop(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    def breaks(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    for function, is_given_up in ((breaks_in_a_loop, True), (breaks, False)):
        assert not private.is_traced(function)
        torch.compile(function, backend="eager")(torch.ones(1))
        assert private.is_traced(function) == (not is_given_up)


def test_unflatten_is_traced_under_a_mode(dynamo: None) -> None:
    """In one graph; as the mode meets it, it would end there."""

    class Mode(_Seen):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return private.as_traced(func)(*args, **(kwargs or {}))

    graphs: list[Any] = []
    compiled = torch.compile(lambda x: (x + 1).unflatten(0, (2, 2)) * 2, backend=_counting(graphs))
    with Mode():
        assert compiled(torch.ones(4)).tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert len(graphs) == 1
    assert private.as_traced(torch.add) is torch.add


def test_what_is_never_a_frame_is_left_to_eager(dynamo: None) -> None:
    """Called by compiled code it is a part of the graph; called by eager code nothing is made of it."""
    graphs: list[Any] = []

    @private.never_a_frame
    def handler(x: Tensor) -> Tensor:
        return x + 1

    compiled = torch.compile(lambda x: handler(x) * 2, backend=_counting(graphs))
    assert compiled(torch.ones(1)).item() == 4.0
    assert len(graphs) == 1
    assert torch.compile(handler, backend=_counting(graphs))(torch.ones(1)).item() == 2.0
    assert len(graphs) == 1


def test_while_it_is_paused_dynamo_compiles_nothing(dynamo: None) -> None:
    """Not even in code that compiled code calls, where a graph breaks."""
    graphs: list[Any] = []

    def inner(x: Tensor) -> Tensor:
        return x + 1

    @private.never_a_frame
    def pausing(x: Tensor) -> Tensor:
        before = private.pause_dynamo(None)
        try:
            return inner(x)
        finally:
            private.pause_dynamo(before)

    @torch.compile(backend=_counting(graphs))
    def compiled(x: Tensor, call: Any) -> Tensor:
        torch._dynamo.graph_break()
        return call(x)

    assert torch.compiler.disable(pausing)(torch.ones(1)).item() == 2.0
    assert compiled(torch.ones(1), torch._dynamo.disable(pausing, recursive=False)).item() == 2.0
    assert not graphs
    assert compiled(torch.ones(1), torch._dynamo.disable(lambda x: inner(x), recursive=False)).item() == 2.0
    assert len(graphs) == 1


def test_graphs_are_wrapped_and_hold_no_attribute_of_a_parameter(dynamo: None, monkeypatch) -> None:
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.tensor import TensorVariable

    for cls, name in ((OutputGraph, "call_user_compiler"), (TensorVariable, private._GET_ATTRIBUTE)):
        monkeypatch.setattr(cls, name, getattr(cls, name))  # which is put back
    ran: list[str] = []
    assigns: list[bool] = []

    def wrap(graph: Any, compiled: private.Graph) -> private.Graph:
        assigns.append(private.assigns_data(graph))

        def run(*args: Any) -> Any:
            ran.append("graph")
            return compiled(*args)

        return run

    changes = private.Dynamo(wrap, lambda p: hasattr(p, "ours"))

    @torch.compile(backend="eager", fullgraph=True)
    def function(p: Any) -> Any:
        return p.data + p * 2

    ours, theirs = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    ours.ours = True  # type: ignore[attr-defined]
    assert function(theirs).item() == 3.0
    assert (ran, assigns) == (["graph"], [False])
    changes.forget_graphs()
    with pytest.raises(private.dynamo_error(), match="answered for outside of graphs"):
        function(ours)

    @torch.compile(backend="eager")
    def assigning(p: Any, value: Tensor) -> Any:
        p.data = value
        return p * 2

    assert assigning(theirs, torch.full((1,), 3.0)).item() == 6.0
    assert assigns[-1]


def test_calls_of_modules() -> None:
    """What takes the place of a call runs hooks as the call does, and is in no copy."""
    module, order = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *unused: order.append("hook"))
    assert private.compiled_call(module) is None

    def forward(x: Tensor) -> Tensor:
        order.append("forward")
        return x

    private.set_compiled_call(module, lambda *args: private.call_with_hooks(module, forward, *args))
    assert module(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    assert order == ["forward", "hook"]
    assert private.compiled_call(module) is not None
    assert private.compiled_call(copy.deepcopy(module)) is None
    assert "forward" not in vars(module)
    private.set_compiled_call(module, None)
    module(torch.ones(1, 2))
    assert order == ["forward", "hook", "hook"]


def test_ways_to_compile_a_module(dynamo: None) -> None:
    """Nothing is compiled before it runs."""
    assert not private.is_compiled(nn.Linear(1, 1))
    assert private.is_compiled(torch.compile(nn.Linear(1, 1), backend="eager"))  # type: ignore[arg-type]
    in_place = nn.Linear(1, 1)
    in_place.compile(backend="eager")
    assert private.is_compiled(in_place)
    by_method = nn.Linear(1, 1)
    by_method.forward = torch.compile(by_method.forward, backend="eager")  # type: ignore[method-assign]
    assert private.is_compiled(by_method)
    assert private.uncompiled(torch.compile(_inside, backend="eager")) is private.uncompiled(_inside) is _inside


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
        p._backward_hooks  # noqa: B018
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
    assert not private.has_accumulation_hooks(p)
    p.register_post_accumulate_grad_hook(lambda p: None)
    assert private.has_accumulation_hooks(p)


def test_who_lies_in_a_storage() -> None:
    p = nn.Parameter(torch.zeros(3, 2))
    assert private.users_of(p.untyped_storage()) == 1
    held = p.data.view(-1)
    storage = p.untyped_storage()
    assert private.users_of(storage) > 1
    del held
    assert private.users_of(storage) == 1


def test_a_storage_is_found_as_long_as_it_is_used() -> None:
    value = torch.arange(3.0)
    alive = StorageWeakRef(value.untyped_storage())
    found = private.storage_behind(alive)
    assert found is not None
    torch.empty(0).set_(found)[1] = 5
    assert value.tolist() == [0, 5, 2]
    del found, value
    assert private.storage_behind(alive) is None


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


def test_a_tensor_that_the_graph_alone_keeps_is_told_from_one_that_python_code_keeps() -> None:
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2, requires_grad=True)
    view = weight.T
    reference = weakref.ref(view)

    assert not private.is_in_graph_alone(reference)
    result = x @ view
    assert not private.is_in_graph_alone(reference)
    kept = [view]
    del view
    assert not private.is_in_graph_alone(reference)
    kept.clear()
    assert private.is_in_graph_alone(reference)
    result.sum().backward()
    assert reference() is None


def test_what_dynamo_does_differently_is_not_taken_for_another_version() -> None:
    """An engine may have run in this process before the first strategy checks the table."""
    code = """
from lightning_zero.private import torch as private
from lightning_zero.private.check import check
private.Dynamo(lambda graph, compiled: compiled, lambda p: False)
check(private.TORCH)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
