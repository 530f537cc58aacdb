"""Internals of Hugging Face's transformers 5: how the tensors of a file become those of a model.

``from_pretrained`` does this itself, but only for a whole model. Other names are taken over, and some tensors are
computed, such as one for all experts of a layer from one for each expert. The functions follow
``transformers.core_model_loading.convert_and_load_state_dict_in_model``.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def is_pretrained_model(model: nn.Module) -> bool:
    """Return True for a model of transformers, without importing it."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def get_init_weights_method(model: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Method of a model that initializes one of its modules, which many models outside of transformers have too."""
    return getattr(model, "_init_weights", None)


def attention_implementation(config: Any) -> str:
    """Attention implementation of the config of a model that was built from it."""
    return str(getattr(config, "_attn_implementation", None) or "eager")


def model_supports_flash_attention(model: Any) -> bool:
    """Return True if transformers uses FlashAttention's functions for a model: causal masks and boundaries alone."""
    return bool(getattr(model, "_supports_flash_attn", False))


def stays_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Return True if transformers keeps a parameter of a model in float32 when the model is loaded in *dtype*."""
    float32_modules = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        float32_modules |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return any(f".{module}." in f".{name}." for module in float32_modules)


@contextmanager
def skip_weight_init() -> Generator[None, None, None]:
    """Construct models without running initializers, and without tying weights."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


@contextmanager
def disable_packed_sequence_detection(packed: bool = False) -> Generator[None, None, None]:
    """Make models take all rows for packed, or each for one document, and not read their positions to find out."""
    module: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(module, "find_packed_sequence_indices", None)
    if module is None or find is None:
        yield
        return
    module.find_packed_sequence_indices = _number_documents if packed else lambda position_ids: None
    try:
        yield
    finally:
        module.find_packed_sequence_indices = find


def _number_documents(position_ids: Tensor) -> Tensor:
    """Document of each token, as ``find_packed_sequence_indices`` numbers them: (rows, length), int64."""
    return (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


@dataclass(frozen=True)
class WeightConversion:
    """How some tensors of the files become some tensors of a model."""

    sources: tuple[str, ...]  # names in the files, in order
    patterns: tuple[str, ...]  # for each source, the pattern of the transform that its name matches
    transform: Any  # transformers' object that converts them; None if one tensor is taken unchanged
    first: str  # name of the first resulting tensor in the model

    def convert_tensors(self, tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Convert tensors, also on the meta device."""
        if self.transform is None:
            return {self.first: tensors[self.sources[0]]}
        numbers: dict[str, set[str]] = defaultdict(set)
        for name, pattern in zip(self.sources, self.patterns, strict=True):
            numbers[pattern].add(".".join(re.findall(r"(?<=\.)\d+(?=\.)", name)))
        sets = list(numbers.values())
        if any(
            part_numbers != next_part_numbers and len(part_numbers) == len(next_part_numbers) > 1
            for part_numbers, next_part_numbers in pairwise(sets)
        ):
            raise ValueError("experts have other numbers in some of their parts than in others")
        transform = deepcopy(self.transform)
        for name, pattern in zip(self.sources, self.patterns, strict=True):
            transform.add_tensor(self.first, name, pattern, tensors[name])
        converted = transform.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def find_weight_conversions(
    model: Any, names: Iterable[str], model_tensor_names: Iterable[str] | None = None
) -> tuple[list[WeightConversion], list[str]]:
    """Find how tensors of files become tensors of *model*, as ``from_pretrained`` would."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state: dict[str, Any] = dict.fromkeys(
        model.state_dict() if model_tensor_names is None else model_tensor_names, True
    )
    conversions: dict[str, WeightConversion] = {}
    unexpected: list[str] = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None  # stored under the model's own name, which a renaming would spoil
        if target not in state:
            target_patterns = by_pattern[pattern].target_patterns if pattern is not None else []
            unexpected += [
                target.replace(target_patterns[0], target_pattern) for target_pattern in target_patterns
            ] or [target]
            continue
        transform = None if pattern is None else by_pattern[pattern]
        before = conversions.get(target, WeightConversion((), (), transform, target))
        if before.sources and (transform is None or before.transform is not transform):
            unexpected.append(name)  # a second name for the same tensor
            continue
        conversions[target] = WeightConversion(
            (*before.sources, name), (*before.patterns, pattern or name), transform, target
        )
    return list(conversions.values()), unexpected


def filter_ignored_keys(model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[list[str], list[str]]:
    """Remove the names that the model's class allows to be missing from files, or to be unexpected in them."""
    from transformers.utils.loading_report import LoadStateDictInfo

    missing, unexpected = list(missing), list(unexpected)
    info = LoadStateDictInfo(set(missing), set(unexpected), set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(info)
    return (
        [name for name in missing if name in info.missing_keys],
        [name for name in unexpected if name in info.unexpected_keys],
    )
