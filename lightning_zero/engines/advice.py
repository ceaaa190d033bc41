"""Advice on errors of libraries whose text names no remedy."""

from __future__ import annotations

from lightning_zero.engines.torch_functions import BROADCAST_IS_SEEN

_IN_SHARDED_MODULES = {
    "mixed torch.Tensor and DTensor": "A sharded parameter met a plain tensor where it was not gathered",
    "Inplace update to inference tensor": "A view of a sharded parameter is read-only: write to the parameter itself",
}
"""Part of an error's text -> its cause; gathering the whole module avoids both."""


def advice_on(text: str, collecting_failed: bool, engine: str) -> str:
    """A sentence for the user on an error with this ``text``, or nothing.

    Args:
        text: The error's own.
        collecting_failed: Whether it came out of the collecting of a checkpoint.
        engine: The run's.
    """
    if collecting_failed and "meta" in text:
        return (
            "While a checkpoint is collected, rank 0 alone has its tensors' values, others their shapes: read"
            " values under `if self.trainer.is_global_zero`."
        )
    if engine == "deepspeed" and "out of bounds for storage of size 0" in text:
        return (
            "A parameter was read where DeepSpeed's stage 3 has not gathered it, as in the own backward of an autograd"
            " function (torchdiffeq's odeint_adjoint): use stage=2 or engine='fsdp2'."
        )
    if "c10d.broadcast_" in text and not BROADCAST_IS_SEEN:
        return (
            "torch.distributed.broadcast of torch below 2.13 cannot be followed on sharded parameters: use torch>=2.13,"
            " or a copy on all ranks: w = p.detach().clone(), broadcast(w, src), p.data.copy_(w)."
        )
    if "c10d." in text:  # DTensor's error: no torch function, so no view has seen the call
        return (
            "A sharded parameter was given to a method of a process group or to torch.distributed._broadcast_coalesced:"
            " call torch.distributed.all_reduce(p.data, group=group) or broadcast(p.data, src), tensor by tensor."
        )
    cause = next((cause for part, cause in _IN_SHARDED_MODULES.items() if part in text), None)
    return f"{cause}. ZeroStrategy(units=[]) gathers the whole module for the length of a step." if cause else ""
