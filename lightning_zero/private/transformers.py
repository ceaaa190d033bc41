"""Private parts of transformers, read in 5.0-5.23: they map the names in its models' files to names in its modules.

``from_pretrained`` uses tables to rename and join tensors (experts become one tensor, old names become new ones). This
file applies the tables to tensors that are still on the disk. transformers 4 has no such tables, so its names stay
unchanged.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.errors import CheckpointError
from lightning_zero.private.check import Library, check

_LOADING = "transformers.core_model_loading"
TRANSFORMERS = Library(
    "transformers",
    ">=5.0,<6",
    {
        "transformers.conversion_mapping": "get_model_conversion_mapping",
        _LOADING: "rename_source_key dot_natural_key WeightRenaming",
        f"{_LOADING}:WeightConverter": "source_patterns add_tensor convert",
        "transformers.modeling_utils:PreTrainedModel": "_keys_to_ignore_on_load_missing"
        " _keys_to_ignore_on_load_unexpected _init_weights",
    },
)


class Converted(NamedTuple):
    """The tensors of a transformers model, converted from those in files."""

    by_name: dict[str, tuple[Tensor, list[str]]]
    """Name in the module -> the lazy tensor, and the names of its sources in the files."""
    unexpected: list[str]


def is_model(module: nn.Module) -> bool:
    """Whether ``module`` is a transformers model. Imports nothing: code that made one has imported transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def initialize(model: Any, module: nn.Module) -> None:
    """Initializes ``module`` as the transformers ``model`` that contains it would, including buffers that its
    constructor computes."""
    model._init_weights(module)


def converted(
    module: Any, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor], lazy: Callable[..., Tensor]
) -> Converted | None:
    """Converts ``tensors`` to the names and layouts of ``module``; returns ``None`` if ``module`` is not a transformers
    model, and for transformers 4.

    ``lazy(shape, dtype, read)`` makes a tensor that calls ``read(start, stop)`` for its rows.
    """
    if not is_model(module) or find_spec(_LOADING) is None:
        return None
    check(TRANSFORMERS)
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    table = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [entry for entry in table if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known = dict(targets)
    done = Converted({}, [])
    parts: dict[str, list[tuple[str, str]]] = {}  # first target -> (pattern, source), in the order of joining
    for source in sorted(tensors, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(source, renamings, converters, module.base_model_prefix, known)
        if name not in known and source in known:
            name, pattern = source, None
        if name not in known:
            done.unexpected.append(source)
        elif pattern is None:
            done.by_name[name] = tensors[source], [source]
        else:
            parts.setdefault(name, []).append((pattern, source))
    for first, sources in parts.items():
        convert = partial(_convert, by_pattern[sources[0][0]], module, first, sources)
        made = convert({s: torch.empty(t.shape, dtype=t.dtype, device="meta") for s, t in tensors.items()})
        for name in [name for name in made if name in known]:
            read = partial(_rows, convert, tensors, name)
            done.by_name[name] = lazy(made[name].shape, made[name].dtype, read), [source for _, source in sources]
    return done


def _convert(
    converter: Any, model: Any, first: str, sources: Sequence[tuple[str, str]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the tensors that ``converter`` makes of ``sources``, by the module's names."""
    converter = copy.deepcopy(converter)
    for pattern, source in sources:
        converter.add_tensor(first, source, pattern, partial(_in_memory, tensors[source]))
    try:
        made = converter.convert(first, model=model, config=model.config)
    except Exception as error:
        raise CheckpointError(
            f"{type(model).__name__}: transformers cannot convert {', '.join(s for _, s in sources[:4])} into {first!r}"
            f" ({type(error).__name__}: {error}): load the model with from_pretrained."
        ) from error
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def _in_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.clone()


def _rows(
    convert: Callable[..., dict[str, Tensor]], tensors: Mapping[str, Tensor], name: str, start: int, stop: int
) -> Tensor:
    with torch.no_grad():
        return convert(tensors)[name][start:stop].clone()


def without_ignored(module: Any, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """Returns both lists without the names that the model's class allows to be missing or left over."""
    if not is_model(module):
        return missing, unexpected

    def rest(names: list[str], patterns: Any) -> list[str]:
        return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]

    return (
        rest(missing, getattr(module, "_keys_to_ignore_on_load_missing", None)),
        rest(unexpected, getattr(module, "_keys_to_ignore_on_load_unexpected", None)),
    )
