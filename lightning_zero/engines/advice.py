"""Advice for library errors whose text names no remedy."""

from __future__ import annotations

from lightning_zero.engines.torch_functions import BROADCAST_IS_SEEN

_IN_SHARDED_MODULES = {
    "mixed torch.Tensor and DTensor": "A sharded parameter was combined with a plain tensor where it was not gathered",
    "Inplace update to inference tensor": "A view of a sharded parameter is read-only: write to the parameter itself",
}
"""Part of an error's text -> its cause. Gathering the whole module avoids both causes."""


def advice_on(text: str, collecting_failed: bool, engine: str) -> str:
    """Returns advice for the user on an error with this ``text``, or an empty string.

    Args:
        text: The error message.
        collecting_failed: Whether the error was raised while a checkpoint was collected.
        engine: The run's engine.
    """
    if collecting_failed and "meta" in text:
        return (
            "While a checkpoint is collected, only rank 0 has the tensors' values and the other ranks have their"
            " shapes: read values under `if self.trainer.is_global_zero`."
        )
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
    if "c10d." in text:  # raised by DTensor: the call is no torch function, so no mode or guarded class intercepts it
        return (
            "A sharded parameter was passed to a method of a process group or to"
            " torch.distributed._broadcast_coalesced: call torch.distributed.all_reduce(p.data, group=group) or"
            " broadcast(p.data, src) for each tensor."
        )
    cause = next((cause for part, cause in _IN_SHARDED_MODULES.items() if part in text), None)
    return f"{cause}. ZeroStrategy(units=[]) keeps the whole module gathered during a step." if cause else ""
