"""An accelerator that computes nothing: engines run on it without a GPU, and every tensor says where it lies.

Tensors are fake (``FakeTensorMode``: shapes, dtypes, devices, no values) on a device of PyTorch's own for backends
written in Python; streams and events do nothing; ranks are one process and a process group that sends nothing. An
operator that meets tensors of two devices raises, as it would on a GPU, and :class:`Copies` counts what crosses.
What is private here is PyTorch's and only tests depend on it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from lightning_zero.comm.shards import local
from lightning_zero.config import OffloadConfig
from lightning_zero.engines.fsdp2 import engine as fsdp2

NAME = "pretend"
OFFLOAD = OffloadConfig(target="cpu", pin_memory=False)
"""There is no real memory to pin; the copies are the same."""


class _Nothing:
    """A stream and an event: whatever is asked of it is done."""

    stream_id = device_index = device_type = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: None

    def record_event(self, *unused: Any) -> _Nothing:
        return _Nothing()


@contextmanager
def _stream(stream: Any) -> Iterator[None]:
    yield


def _device_module() -> Any:
    module = types.ModuleType(NAME)
    functions: dict[str, Any] = {
        "Stream": lambda *args, **kwargs: _Nothing(),
        "Event": lambda *args, **kwargs: _Nothing(),
        "current_stream": lambda *args: _Nothing(),
        "stream": _stream,
        "synchronize": lambda *args: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda *args: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda *args: None,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda *args: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


@contextmanager
def accelerator(world_size: int) -> Iterator[torch.device]:
    """Inside, this process is rank 0 of ``world_size`` on a pretended device; for processes of their own, because
    PyTorch cannot forget a device again."""
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME, backend_module=_device_module())
    handle = getattr(torch, NAME)
    make_mesh = fsdp2.make_mesh

    def real_mesh(*args: Any) -> Any:  # its ranks are values
        with unset_fake_temporarily():
            return make_mesh(*args)

    with ExitStack() as stack:
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            if hasattr(module, "_get_device_handle"):
                stack.enter_context(mock.patch.object(module, "_get_device_handle", return_value=handle))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", return_value=_Nothing()))
        stack.enter_context(mock.patch.object(fsdp2, "make_mesh", real_mesh))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensorMode())
        yield torch.device(NAME, 0)


class Copies(TorchDispatchMode):
    """Bytes that operators copy between the pretended device and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_") and isinstance(result, Tensor):
            source = args[0] if name == "_to_copy" else args[1]
            if source.device.type != result.device.type:
                nbytes = source.numel() * source.element_size()
                if result.device.type == NAME:
                    self.up += nbytes
                else:
                    self.down += nbytes
        return result


def where(tensor: Tensor) -> str:
    """``"device"`` or ``"host"``, of this rank's part."""
    tensor = local(tensor)
    return "device" if tensor.device.type == NAME else "host"
