"""Advice for library errors whose text names no remedy."""

from __future__ import annotations

from lightning_zero.engines.torch_functions import BROADCAST_IS_SEEN


def advice_on(text: str, engine: str) -> str:
    """Returns advice for the user on an error with this ``text``, or an empty string.

    Args:
        text: The error message.
        engine: The run's engine.
    """
    if engine == "deepspeed" and "out of bounds for storage of size 0" in text:
        return (
            "A parameter was read where DeepSpeed's stage 3 has not gathered it, as in the backward of a custom"
            " autograd function (torchdiffeq's odeint_adjoint): use stage=2 or engine='fsdp2'."
        )
    if "c10d.broadcast_" in text and not BROADCAST_IS_SEEN:
        return (
            "Before torch 2.13, torch.distributed.broadcast does not work on sharded parameters: use torch>=2.13, or"
            " broadcast a copy on all ranks: w = p.detach().clone(), broadcast(w, src), p.data.copy_(w)."
        )
    return ""
