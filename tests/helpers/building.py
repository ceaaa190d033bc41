"""Modules built in ``configure_model`` at stage 3: shared out as they come, beside the whole module on every rank."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_zero.engines.fsdp2 import build
from lightning_zero.private.torch import DisableTorchFunction
from tests.helpers.pretrained import hugging_face
from tests.helpers.zoo import WIDTH, Zoo, make_trainer

BLOCKS = {"min_unit_numel": 1}
SETTINGS = {"stage": 3, **BLOCKS}


@contextmanager
def everything_closes() -> Iterator[None]:
    """Also what is smaller than is worth it."""
    before = build.OPEN_BYTES, build.LEAST_BYTES
    build.OPEN_BYTES, build.LEAST_BYTES = 1, 1
    try:
        yield
    finally:
        build.OPEN_BYTES, build.LEAST_BYTES = before


# -- what constructors do --------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """(B, WIDTH) -> (B, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.inner)


class Counted(Zoo):
    """Eight layers, made or given other values by ``options["way"]``; ``seen`` is the number of their bytes that were
    full after each."""

    def build(self) -> None:
        self.body: Any = None
        self.seen: list[int] = []

    def configure_model(self) -> None:
        if self.body is not None:
            return
        way, layers = self.options.get("way", "made"), [Layer()]
        for _ in range(7):
            layers.append(Layer())
            self._count(layers)
        for layer in layers if way == "given" else ():
            layer.inner.data = torch.randn(WIDTH, WIDTH)
            self._count(layers)
        self.body = nn.Sequential(*layers)

    def _count(self, layers: list[Layer]) -> None:
        with DisableTorchFunction():  # a look at memory would keep it
            self.seen.append(sum(layer.inner.untyped_storage().nbytes() for layer in layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def bytes_seen(settings: dict[str, Any], way: str = "made") -> list[int]:
    module = Counted(way=way)
    with everything_closes():
        make_trainer({**SETTINGS, **settings}, max_steps=1, limit_val_batches=0).fit(module, loader())
    return module.seen


class Wild(Zoo):
    """Does in ``configure_model`` whatever constructors are known to do."""

    def build(self) -> None:
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.start: dict[str, Tensor] = {}
        self.body: nn.Module | None = None

    def configure_model(self) -> None:
        if self.body is not None:
            return
        torch.manual_seed(3 + 100 * int(os.environ["RANK"]) * self.options.get("seeds_differ", False))
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), 2)
        self.head, self.other, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.other.weight = self.head.weight  # tied
        self.third.weight = nn.Parameter(self.body[0].weight.data.clone())
        self.shares = nn.Parameter(self.third.bias.data)  # two parameters of one memory
        del self.third.bias
        self.third.bias = self.shares
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH).t())  # of the root; not contiguous
        self.low = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
        self.register_buffer("total", self.body[1].weight.sum(0))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.twin = copy.deepcopy(self.body[2])
        view = self.body[2].weight.data
        self.late = nn.Linear(WIDTH, WIDTH)
        view[0] = 0.5  # a view taken before its memory went
        nn.init.orthogonal_(self.late.weight)
        nn.init.trunc_normal_(self.body[3].weight, std=0.3)
        with torch.no_grad():
            self.head.weight.mul_(0.5).add_(self.body[1].weight)
            self.late.weight.copy_(torch.from_numpy(self.body[0].weight.detach().numpy()).flip(0))
            self.encoder.layers[1].linear1.weight.data = torch.randn_like(self.encoder.layers[1].linear1.weight)
        self.apply(lambda m: nn.init.normal_(m.bias, std=0.1) if isinstance(m, nn.Linear) else None)
        self.late.double().float()
        self.body[3].weight.requires_grad_(False)
        loss = self.late(self.head(torch.ones(2, WIDTH))).square().mean()
        self.register_buffer("sensitivity", torch.autograd.grad(loss, self.head.weight)[0].norm())
        state = {k: v.flip(0) if v.dim() else v for k, v in self.body.state_dict().items()}
        self.body.load_state_dict(state)
        assert self.head.weight.shape == (WIDTH, WIDTH)
        assert self.head.weight.device.type == "cpu"
        assert self.head.weight.tolist() == self.other.weight.tolist()

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.body(self.entry(x))[:, None])[:, 0]  # type: ignore[misc]
        x = self.normed(x) + self.twin(x) + self.third(x) + x @ self.own + self.low
        return self.other(self.late(self.head(x))) + self.total * self.sensitivity

    def on_train_start(self) -> None:
        self.start = {k: v.detach().clone() for k, v in self.state_dict().items()}


class Odd(Zoo):
    """Does one thing in ``configure_model`` that fits nowhere else: ``options["how"]``."""

    def build(self) -> None:
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.start: dict[str, Tensor] = {}
        self.body: Any = None

    def configure_model(self) -> None:
        if self.body is not None:
            return
        torch.manual_seed(3)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.body = layers
        getattr(self, self.options["how"])(layers)

    def spectral_norm(self, layers: nn.Sequential) -> None:
        for layer, norm in zip(
            layers,
            (parametrizations.spectral_norm, parametrizations.orthogonal, nn.utils.spectral_norm, nn.utils.weight_norm),
            strict=True,
        ):
            norm(layer)  # type: ignore[operator]

    def lazy(self, layers: nn.Sequential) -> None:
        self.body = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyLinear(WIDTH), layers)
        self.body(torch.ones(2, WIDTH))

    def loaded(self, layers: nn.Sequential) -> None:
        file = io.BytesIO()
        torch.save(layers.state_dict(), file)
        pickled = pickle.loads(pickle.dumps(layers))
        pickled.load_state_dict(torch.load(io.BytesIO(file.getvalue())), assign=True)
        self.body = nn.Sequential(layers, pickled)

    def containers(self, layers: nn.Sequential) -> None:
        self.many = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(3)])
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2)
        vector = nn.utils.parameters_to_vector(layers.half().float().parameters())
        nn.utils.vector_to_parameters(vector * 2, layers.parameters())

    def functional(self, layers: nn.Sequential) -> None:
        stacked, _ = torch.func.stack_module_state(list(layers))
        with torch.no_grad():
            out = torch.func.functional_call(layers, dict(layers.named_parameters()), (torch.ones(1, WIDTH),))
        self.register_buffer("out", out + stacked["weight"].sum())
        self.body = torch.fx.symbolic_trace(layers)

    def builds_in_threads(self, layers: nn.Sequential) -> None:
        def make(_: int) -> nn.Module:
            layer = nn.Linear(WIDTH, WIDTH)
            nn.init.eye_(layer.weight)  # threads share one generator of random numbers
            nn.init.zeros_(layer.bias)
            return layer

        with ThreadPoolExecutor(2) as pool:
            self.body = nn.Sequential(*pool.map(make, range(4)))

    def reads_in_threads(self, layers: nn.Sequential) -> None:
        with ThreadPoolExecutor(2) as pool:
            self.sums = list(pool.map(lambda p: p.sum().item(), layers.parameters()))

    def fails_in_a_thread(self, layers: nn.Sequential) -> None:
        threading.excepthook, before = lambda args: None, threading.excepthook
        thread = threading.Thread(target=layers[0].weight.sum if os.environ["RANK"] == "1" else int)
        thread.start()
        thread.join()
        threading.excepthook = before

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.entry(x))

    def on_train_start(self) -> None:
        self.start = {k: v.detach().clone() for k, v in self.state_dict().items()}


ODD = ("spectral_norm", "lazy", "loaded", "containers", "functional", "builds_in_threads")


def odd_ones() -> list[tuple[str, list[str]]]:
    """``(how, what differs)``"""
    return [(how, differences(Odd, {"how": how}, {})) for how in ODD]


class Pretrained(Zoo):
    """A model of transformers' with the weights of a folder."""

    def build(self) -> None:
        self.model: Any = None
        self.start: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(5)
            self.model = type(hugging_face("llama")).from_pretrained(self.options["path"]).train()

    def on_train_start(self) -> None:
        self.start = {k: v.detach().clone() for k, v in self.state_dict().items()}
        self.start |= {k: v.clone() for k, v in self.named_buffers()}

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.record(sum(p.square().sum() for p in self.parameters()))  # type: ignore[arg-type]


def loader() -> DataLoader[Any]:
    return DataLoader(
        torch.utils.data.TensorDataset(*[torch.arange(8.0 * WIDTH).view(8, WIDTH).sin()] * 2), batch_size=2
    )


def fit(make: Callable[..., Any], options: dict[str, Any], settings: dict[str, Any]) -> Any:
    """``(losses, values at the start, after the run)``."""
    torch.manual_seed(1)
    module = make(**options)
    with everything_closes():
        trainer = make_trainer(settings, max_steps=2, max_epochs=None, limit_val_batches=0)
        trainer.fit(module, loader())
    gc.collect()
    return module.losses, module.start, {k: v.clone() for k, v in module.state_dict().items()}


def differences(make: Callable[..., Any], options: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Names of what differs from a module that was whole on every rank."""
    whole, auto = (fit(make, options, {**SETTINGS, **settings, "build": how}) for how in ("whole", "auto"))
    differ = ["losses"] if whole[0] != auto[0] else []
    for what, one, other in zip(("start", "end"), whole[1:], auto[1:], strict=True):
        assert one.keys() == other.keys()
        assert one
        differ += [f"{what} {name}" for name in one if not torch.equal(one[name], other[name])]
    return differ


# -- ranks that do not do the same -----------------------------------------------------------------------------------


class Unlike(Counted):
    """``how`` one rank differs from the others in ``configure_model``."""

    def configure_model(self) -> None:
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        how = self.options["how"]
        if last and how == "builds more":
            self.more = nn.Linear(WIDTH, WIDTH)
        super().configure_model()
        if last and how == "reads":
            self.body[0].inner.sum()
        if last and how == "raises":
            raise KeyError("no such layer")


def fit_odd(how: str, build_as: str) -> None:
    with everything_closes():
        trainer = make_trainer({**SETTINGS, "build": build_as}, max_steps=1, limit_val_batches=0)
        trainer.fit(Odd(how=how), loader())


def fit_unlike(how: str, build_as: str) -> None:
    with everything_closes():
        trainer = make_trainer({**SETTINGS, "build": build_as}, max_steps=1, limit_val_batches=0)
        trainer.fit(Unlike(how=how), loader())


class Failing(Counted):
    """Breaks on all ranks after ``configure_model``, once."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = True

    def configure_model(self) -> None:
        super().configure_model()
        self.held = self.body[0].inner.data if self.broken else None


def fit_again_after_failure() -> Any:
    """``(the first error, shapes in between, weights after the second run, weights without the failure)``."""
    results = []
    for breaks in (True, False):
        torch.manual_seed(4)
        module = Failing()
        module.broken = breaks
        with everything_closes():
            if breaks:
                try:
                    make_trainer(SETTINGS, max_steps=2, limit_val_batches=0).fit(module, loader())
                except ValueError as error:
                    results.append(str(error))
                results.append([tuple(p.shape) for p in module.parameters()])
                module.broken = False
            make_trainer(SETTINGS, max_steps=2, limit_val_batches=0).fit(module, loader())
        results.append({k: v.clone() for k, v in module.state_dict().items()})
    return results


def resume(path: str) -> Any:
    """Start of a run that continues one of another seed, and what that had saved."""
    settings = {**SETTINGS, "build": "auto"}
    with everything_closes():
        torch.manual_seed(8)
        first = make_trainer(settings, max_steps=1, limit_val_batches=0)
        first.fit(Counted(), loader())
        first.save_checkpoint(path)
        torch.manual_seed(9)
        module, start = Counted(), {}
        trainer = make_trainer(settings, max_steps=2, limit_val_batches=0, callbacks=[_Start(start)])
        trainer.fit(module, loader(), ckpt_path=path)
        validated = Counted()
        make_trainer(settings).validate(validated, loader(), ckpt_path=path, verbose=False)
    return (
        start,
        torch.load(path, weights_only=False)["state_dict"],
        {k: v.clone() for k, v in validated.state_dict().items()},
    )


class _Start(L.Callback):
    def __init__(self, start: dict[str, Tensor]) -> None:
        self.start = start

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.start.update((k, v.detach().clone()) for k, v in module.state_dict().items())
