"""Which optimizers may step on shards: a wrong yes is silently wrong training, a wrong no is only slow."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

from lightning_zero.engines.elementwise import KNOWN_ELEMENTWISE, is_elementwise, is_known, keys_besides_elements
from lightning_zero.engines.optimizer_family import family
from lightning_zero.engines.optimizer_step import refuse_sharding
from lightning_zero.private import torch_optim
from tests.helpers import optimizers, zoo


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 3))]


@pytest.mark.parametrize("optimizer", sorted(KNOWN_ELEMENTWISE, key=lambda c: c.__name__))
def test_what_is_known_holds_when_tried(optimizer):
    """The list is not taken on trust: ten steps on whole tensors and on their halves agree to the last bit."""
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(6, 4, generator=generator), torch.randn(5, generator=generator)]
    halves = [part.clone() for w in full for part in w.chunk(2)]
    tried = [optimizer([t.requires_grad_() for t in tensors], lr=0.01) for tensors in (full, halves)]
    for _ in range(10):
        grads = [torch.randn(w.shape, generator=generator) for w in full]
        for tensors, values in ((full, grads), (halves, [part for g in grads for part in g.chunk(2)])):
            for t, value in zip(tensors, values, strict=True):
                t.grad = value.clone()
        for each in tried:
            each.step()
    for w, parts in zip(full, (halves[:2], halves[2:]), strict=True):
        assert torch.equal(w, torch.cat(parts))


def test_others_are_element_wise_only_if_declared():
    class Subclass(AdamW):
        pass

    lamb = zoo.Lamb(_params())
    assert is_elementwise(AdamW(_params()))
    assert not is_elementwise(Subclass(_params()))
    assert not is_elementwise(lamb)
    assert is_elementwise(lamb, ("Lamb",))
    assert not is_elementwise(torch.optim.Muon(_params(), lr=0.01), ("Lamb",))


def test_a_replaced_step_is_not_known_but_a_schedulers_is():
    scheduled = AdamW(_params())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert "step" in vars(scheduled)
    assert is_known(scheduled)
    replaced = AdamW(_params())
    inner = replaced.step
    replaced.step = lambda closure=None: inner(closure)  # type: ignore[method-assign]
    assert not is_elementwise(replaced)


def test_an_optimizer_with_a_say_in_its_states_is_told_from_others():
    """Its hooks and methods expect full states, not shards."""

    class Own(AdamW):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)

    hooked = AdamW(_params())
    assert not torch_optim.has_own_state_dict(hooked)
    hooked.register_load_state_dict_post_hook(lambda optimizer: None)
    assert torch_optim.has_own_state_dict(hooked)
    assert torch_optim.has_own_state_dict(Own(_params()))


def test_a_declared_one_that_cannot_be_tried_is_refused_by_name():
    class Peculiar(Optimizer):
        def __init__(self, params, secret):
            super().__init__(params, {})

        def step(self, closure=None):
            pass

    with pytest.raises(ValueError, match=r"elementwise_optimizers=\['Peculiar'\].*leave it out"):
        keys_besides_elements(Peculiar(_params(), secret=1))


def test_a_family_is_all_optimizers_inside():
    inner = torch.optim.SGD(_params(), lr=0.1)
    outer = optimizers.Lookahead(inner)
    around = optimizers.Lookahead(outer)
    assert family(around) == [around, outer, inner]


def test_a_declared_one_that_keeps_parameters_elsewhere_is_refused_by_name():
    """There the full parameter would be read for its shard in the step."""
    with pytest.raises(ValueError, match=r"keeps parameters in its attribute '_inner'.*leave it out"):
        keys_besides_elements(optimizers.Lookahead(AdamW(_params())))


def test_an_optimizer_that_shards_by_itself_is_refused_by_name():
    own = object.__new__(ZeroRedundancyOptimizer)
    own.optim = torch.optim.Adam(_params())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer shards the states of Adam"):
        refuse_sharding([own])
