"""Weights in folders written by Hugging Face's ``save_pretrained``, for models of which each rank holds a part.

A model is first built without initializers. Its parameters are memory that the operating system does not provide
before it is written, and each rank reads and writes only the tensors of its stages. Where transformers computes
a tensor from several of the files, such as that of all experts of a layer, these are read together. The model's
constructor computes tensors that are not in the files, such as rotary frequencies.

The path of the folder is trusted, and so are links in it, which Hugging Face's cache consists of. An index may only
name files of the folder, and the safetensors package checks offsets against the file. No code in the folder is run.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_pipe._compat.transformers import (
    WeightConversion,
    filter_ignored_keys,
    find_weight_conversions,
    is_pretrained_model,
    skip_weight_init,
)
from lightning_pipe.checkpoints.optimizer_state import describe_names
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import short_repr
from lightning_pipe.llm.model.stage_module import named_parameters_and_buffers

_LATER = ContextVar("later", default=False)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Dtypes that convert directly to a parameter's dtype, unlike those of quantized weights.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """Description of a tensor in a file.

    Attributes:
        file: name of the file in the folder.
        shape: shape of the tensor.
        dtype: name of the dtype in safetensors, such as ``BF16``.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str


class PretrainedWeights:
    """The tensors of a local folder that ``save_pretrained`` wrote: one file, or several and their index.

    The constructor reads the headers of the files and checks them against the file sizes. Tensors are read on request.

    Args:
        folder: path of the folder, with ``model.safetensors`` or ``model.safetensors.index.json``, and ``config.json``.

    Attributes:
        folder: path of the folder.
        tensors: descriptions of the tensors, by their names in the files.

    Raises:
        SetupError: the folder does not exist or holds no safetensors, or a file is missing or cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = _check_local_folder(folder)
        self.tensors: dict[str, StoredTensor] = {}
        for file, names in _list_weight_files(self.folder).items():
            with _open_safetensors(self.folder / file) as opened:
                for name in names or opened.keys():
                    header = opened.get_slice(name)
                    self.tensors[name] = StoredTensor(file, tuple(header.get_shape()), header.get_dtype())

    def config(self) -> Any:
        """The folder's ``PretrainedConfig``.

        Raises:
            SetupError: the folder has no config, transformers does not know its model, or the weights are quantized.
        """
        from transformers import AutoConfig

        path = self.folder / "config.json"
        try:
            config: Any = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # any type, because each model class validates its own values
            reason = (
                str(error)[:1000] if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
            )
            raise SetupError(f"{str(path)!r} cannot be used: {reason[:1000]}") from error
        if getattr(config, "quantization_config", None) is not None:
            raise SetupError(
                f"the weights in {str(self.folder)!r} are quantized (config.json has a quantization_config), expected"
                " weights that can be trained. Use the original model that was quantized"
            )
        return config

    def match(self, model: nn.Module) -> list[tuple[WeightConversion, list[str]]]:
        """Match the tensors in the files to those of *model*.

        Names are mapped, and tensors converted, as in ``from_pretrained``: older names, files of a base model without
        a head, which lack its prefix, and experts that are stored one by one. A parameter with several names needs one
        of them in the files. Names that the class declares as ignored are ignored, except for missing parameters.

        Args:
            model: the whole model, whose tensors need no memory.

        Returns:
            Conversions, each with the names of the model's tensors that it gives: all those of the model's state.

        Raises:
            SetupError: a tensor is missing or unexpected, has another shape or kind, or cannot be converted. All are
                listed by the model's names.
        """
        conversions, unexpected = _find_weight_conversions(model, self.tensors)
        saved, tensors = model.state_dict().keys(), dict(named_parameters_and_buffers(model))
        results: dict[str, StoredTensor] = {}
        matched: list[tuple[WeightConversion, list[str]]] = []
        failed: dict[str, str] = {}
        for conversion in conversions:
            try:
                converted = self._describe_converted_tensors(conversion, model)
            except Exception as error:  # any type, because each conversion has its own checks
                failed[conversion.first] = f"{len(conversion.sources)} tensors: {str(error)[:300]}"
                continue
            unexpected += [name for name in converted if name not in tensors]
            # Some files hold buffers that the model computes and does not save.
            converted = {name: tensor for name, tensor in converted.items() if name in saved}
            results |= converted
            matched.append((conversion, list(converted)))
        groups: dict[int, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            if name in saved:
                groups[id(tensor)].append(name)
        stored = results.keys() | failed.keys()
        missing = [names[0] for names in groups.values() if not stored & set(names)]
        if is_pretrained_model(model):
            # A parameter must not be missing, since no initializer has run.
            needed = [name for name in missing if isinstance(tensors[name], nn.Parameter)]
            buffers, unexpected = filter_ignored_keys(
                model, [name for name in missing if name not in needed], unexpected
            )
            missing = needed + buffers
        problems = describe_names("missing in it", missing) + describe_names("unexpected in it", unexpected)
        problems += _describe_tensor_mismatches(results, tensors)
        problems += describe_names("not convertible", [f"{name} (from {why})" for name, why in failed.items()])
        if problems:
            raise SetupError(
                f"the folder {str(self.folder)!r} does not fit the {type(model).__name__}: {'; '.join(problems)}. Build"
                " the model from the folder's config.json, or use the folder to which this model was saved"
            )
        return matched

    def read(self, groups: Iterable[Iterable[str]]) -> Iterator[dict[str, Tensor]]:
        """Read tensors, group by group.

        Args:
            groups: names of tensors in the files, not in a model; those of a group are in memory together.

        Yields:
            The tensors of each group by their names, on the CPU, in the file's dtype. They may be views of the file:
            copy them.

        Raises:
            SetupError: a file can no longer be read.
        """
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for names in groups:
                tensors = {}
                for name in names:
                    file = self.tensors[name].file
                    if file not in opened:
                        opened[file] = stack.enter_context(_open_safetensors(self.folder / file))
                    tensors[name] = opened[file].get_tensor(name)
                yield tensors

    def _describe_converted_tensors(self, conversion: WeightConversion, model: nn.Module) -> dict[str, StoredTensor]:
        """Describe what a conversion gives, by the model's names."""
        sources = [self.tensors[name] for name in conversion.sources]
        if conversion.transform is None:
            return {conversion.first: sources[0]}
        kind = next((source.dtype for source in sources if source.dtype not in _FLOATS), sources[0].dtype)
        empty = {
            name: torch.empty(source.shape, dtype=_FLOATS.get(source.dtype, torch.uint8), device="meta")
            for name, source in zip(conversion.sources, sources, strict=True)
        }
        results = conversion.convert_tensors(empty, model)
        return {name: StoredTensor(sources[0].file, tuple(tensor.shape), kind) for name, tensor in results.items()}


def _describe_tensor_mismatches(results: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> list[str]:
    sizes, kinds = [], []
    for name, stored in results.items():
        tensor = tensors[name]
        if stored.shape != tuple(tensor.shape):
            sizes.append(f"{name} ({list(stored.shape)}, expected {list(tensor.shape)})")
        elif (stored.dtype in _FLOATS) != tensor.is_floating_point():
            kinds.append(f"{name} ({stored.dtype}, expected a dtype that converts to {tensor.dtype})")
    return describe_names("of another size", sizes) + describe_names("of another kind", kinds)


def build_uninitialized_causal_lm(config: Any, attention: str | None) -> nn.Module:
    """Causal LM with uninitialized parameters of torch's default dtype, and the buffers that its constructor computes.

    No initializer runs and no random number is drawn, so no parameter is written.
    """
    from transformers import AutoModelForCausalLM

    try:
        with skip_weight_init():
            model: Any = AutoModelForCausalLM.from_config(
                # A copy, since transformers sets its dtype: an export has that of the files.
                copy.deepcopy(config),
                attn_implementation=attention,
                dtype=torch.get_default_dtype(),
            )
    except Exception as error:  # any type, because each model class uses its own values
        reason = f"{type(error).__name__}: {str(error)[:1000]}. Check the config's values"
        raise SetupError(f"the {config.model_type} model of the config cannot be made: {reason}") from error
    model.tie_weights()  # skipped without initializers
    return cast(nn.Module, model)


def pretrained_causal_lm(weights: PretrainedWeights, config: Any, attention: str | None) -> nn.Module:
    """Causal LM with the weights of a folder.

    Files and model are compared before parameters take memory, so that a config that does not fit the files is rejected
    even if its model would be too large.
    """
    with torch.device("meta"):
        weights.match(build_uninitialized_causal_lm(config, attention))
    model = build_uninitialized_causal_lm(config, attention)
    load_pretrained_weights(model, weights)
    return model


@contextmanager
def deferred_weight_loading() -> Iterator[None]:
    """Context in which :func:`load_pretrained_weights` only compares model and files: ranks load their parts later."""
    token = _LATER.set(True)
    try:
        yield
    finally:
        _LATER.reset(token)


def load_pretrained_weights(
    model: nn.Module, weights: PretrainedWeights, keep: Callable[[str], bool] = lambda name: True
) -> None:
    """Load tensors of *model* from the files. No other tensor is read.

    Values are converted to the dtype and device of the model's tensors. In addition to the model, only the tensors of
    the files that one of its tensors is made of are in memory at a time. No random numbers are drawn.

    Args:
        model: the whole model, under its own names. While a strategy builds a model, the files are only compared with
            it, and are loaded when it is split.
        weights: weights of the whole model.
        keep: True for the names of the tensors to load (default: all). Tied names of one tensor count together.

    Raises:
        SetupError: the weights are not the model's (see :meth:`PretrainedWeights.match`), on every rank that sees the
            same files; a file cannot be read; the files have two values for a tied parameter; or the model is on the
            meta device.
    """
    matched = weights.match(model)
    if _LATER.get():
        return
    tensors = dict(named_parameters_and_buffers(model))
    needed_ids = {id(tensor) for name, tensor in tensors.items() if keep(name)}
    selected = [
        (conversion, needed)
        for conversion, targets in matched
        if (needed := [target for target in targets if id(tensors[target]) in needed_ids])
    ]
    if any(tensors[name].is_meta for _, needed in selected for name in needed):
        raise SetupError(
            f"the {type(model).__name__} was built on the meta device, so {str(weights.folder)!r} cannot be loaded into"
            " it. Build the model on a device that has memory"
        )
    names: dict[int, str] = {}
    with torch.no_grad():
        for (conversion, needed), values in zip(
            selected, weights.read(conversion.sources for conversion, _ in selected), strict=True
        ):
            converted = conversion.convert_tensors(values, model)
            for name in needed:
                first = names.setdefault(id(tensors[name]), name)
                if first == name:
                    tensors[name].copy_(converted[name])
                elif not torch.equal(tensors[name], converted[name].to(tensors[name])):
                    raise SetupError(
                        f"{first} and {name} are tied in the model but of other values in {str(weights.folder)!r}. Set"
                        " tie_word_embeddings to false in its config.json"
                    )


# ---------------------------------------------------------------------- files


def _check_local_folder(folder: str | Path) -> Path:
    path = Path(folder)
    if path.is_dir():
        return path
    on_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(folder))
    fix = (
        f"For a model on the Hugging Face Hub, run 'hf download {folder} --local-dir FOLDER' and give FOLDER"
        if on_hub
        else "Give the path of a folder that save_pretrained wrote"
    )
    raise SetupError(f"{str(folder)!r} is no folder, and weights are only read from local folders. {fix}")


def _list_weight_files(folder: Path) -> dict[str, list[str] | None]:
    """Files of the folder, with the names of the tensors to read from each file; None for all tensors."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: None}
    index = folder / _INDEX
    if not index.is_file():
        contents = describe_names("it holds", [path.name for path in folder.iterdir()]) or ["it is empty"]
        raise SetupError(
            f"the folder {str(folder)!r} has neither {_SINGLE} nor {_INDEX} ({contents[0]}). Convert other weights to"
            " safetensors with transformers: from_pretrained(...).save_pretrained(...)"
        )
    files: dict[str, list[str] | None] = {}
    for name, file in _weight_map(index).items():
        cast(list[str], files.setdefault(file, [])).append(name)
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Names of the files that hold tensors, by the name of the tensor."""
    try:
        files: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
        foreign = [file for file in files.values() if not file or Path(file).name != file]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SetupError(
            f"{str(index)!r} cannot be read: expected JSON with names of files as weight_map ({type(error).__name__}:"
            f" {str(error)[:200]}). Copy or download it again"
        ) from error
    if foreign:
        raise SetupError(
            f"{str(index)!r} cannot be used: expected files in its folder as weight_map, got {short_repr(foreign[0])}."
            " Copy or download the folder again"
        )
    return files


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as opened:
            yield opened
    except (safetensors.SafetensorError, OSError, TypeError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SetupError(f"{str(path)!r} cannot be read: {reason}. Copy or download it again") from error


# ---------------------------------------------------------------------- names


def _find_weight_conversions(model: nn.Module, names: Iterable[str]) -> tuple[list[WeightConversion], list[str]]:
    if is_pretrained_model(model):
        return find_weight_conversions(model, names)
    return [WeightConversion((name,), (name,), None, name) for name in names], []
