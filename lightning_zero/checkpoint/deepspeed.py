"""Reads the folders that DeepSpeed's own ``save_checkpoint`` writes, alone or under Lightning's strategy.

::

    x/
        latest                                      the name of the newest tag
        global_step5/                               a tag
            (zero_pp_rank_0_)mp_rank_00_model_states.pt        buffers, names, shapes, the caller's own entries
            (bf16_)zero_pp_rank_*_mp_rank_00_optim_states.pt   flat master weights and optimizer states, one per rank

Weights come from DeepSpeed's ``zero_to_fp32``. Optimizer states are not read: their layout is DeepSpeed's own. The
files are pickles that name DeepSpeed's classes, so they are read only if the user trusts their origin.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.errors import CheckpointError
from lightning_zero.host import require_deepspeed

_OWN_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler"
    " data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size"
    " mp_world_size ds_config ds_version universal_checkpoint_info autotp_config".split()
)
"""Keys that DeepSpeed itself puts into a model file; all other keys are the caller's."""


def find(path: str) -> tuple[Path, str] | None:
    """Returns ``(folder, tag)`` if ``path`` is a folder that DeepSpeed wrote, or a tag in one; else ``None``."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    if any(folder.glob("*_optim_states.pt")):
        return folder.parent, folder.name
    latest = folder / "latest"
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
        if any((folder / tag).glob("*_states.pt")):
            return folder, tag
    return None


def read(path: str, weights_only: bool | None) -> dict[str, Any]:
    """Reads the checkpoint into Lightning's form, with full fp32 weights and without optimizer states.

    Args:
        path: A path that :func:`find` recognizes.
        weights_only: Must be ``False``.

    Raises:
        CheckpointError: If the checkpoint cannot be read; names the fault and the repair.
    """
    found = find(path)
    assert found is not None
    folder, tag = found
    if weights_only is not False:
        raise CheckpointError(
            f"{path} has DeepSpeed's own form: its files are pickles that name DeepSpeed's classes. If you trust their"
            " origin, convert it with --no-weights-only."
        )
    try:
        require_deepspeed()
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{path} has DeepSpeed's own form: pip install deepspeed to read it.") from error
    try:
        return _read(folder, tag)
    except CheckpointError:
        raise
    except Exception as error:  # reading a damaged or incomplete folder may raise any exception
        raise CheckpointError(
            f"{folder / tag} could not be read ({type(error).__name__}: {error}): was it written completely, by all"
            " ranks, and by this version of DeepSpeed or an older one?"
        ) from error


def _read(folder: Path, tag: str) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    model = _load(_model_file(folder / tag))
    with _quiet():
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
    weights = _complete(dict(weights), model["module"])
    content = {key: value for key, value in model.items() if key not in _OWN_KEYS}
    content["state_dict"] = weights
    content.setdefault("epoch", 0)
    content.setdefault("global_step", int(model.get("global_steps", 0)))
    content.setdefault("pytorch-lightning_version", metadata.version("lightning"))
    content.setdefault("lr_schedulers", [model["lr_scheduler"]] if model.get("lr_scheduler") else [])
    return content


def _complete(weights: dict[str, Tensor], module: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns ``weights`` in the module's order and adds frozen parameters, which stage 1 keeps only in the model
    file."""
    made = {}
    for name, tensor in module.items():
        if name in weights:
            made[name] = weights[name]
        elif isinstance(tensor, Tensor) and tensor.numel():
            made[name] = tensor.float() if tensor.is_floating_point() else tensor
    return {**made, **{name: tensor for name, tensor in weights.items() if name not in made}}


def _model_file(folder: Path) -> Path:
    files = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not files:
        raise CheckpointError(f"{folder} has no *_model_states.pt, so it is incomplete: use another checkpoint.")
    if list(folder.glob("*mp_rank_01_model_states.pt")):
        raise CheckpointError(
            f"{folder} was written under tensor parallelism, which lightning_zero does not read: use a checkpoint that"
            " was written without it."
        )
    return files[0]


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


@contextlib.contextmanager
def _quiet() -> Any:
    """Suppresses the output of DeepSpeed's tools, which print a line per file and draw progress bars."""
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        yield
