"""Weights in folders written by Hugging Face's ``save_pretrained``, for models of which each rank holds a part.

A model is first built without memory or initialisers. Each rank then allocates the tensors of its stages, and reads
only these, one at a time. No rank holds the whole model, neither in memory nor as the contents of a file. The model's
constructor computes tensors that are not in the files, such as rotary frequencies.

The path of the folder is trusted, and so are links in it, which Hugging Face's cache consists of. The contents of the
files are not trusted. The size, depth and numbers of JSON are checked before use, an index may only name files of the
folder, and the safetensors package checks offsets against the file. No code in the folder is run.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_pipe.checkpoints.named_optimizer import listed
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.deferred import tensors_are_fake
from lightning_pipe.llm.model.hf_files import check_header, read_bounded_config, read_index

__all__ = ["PretrainedWeights", "StoredTensor", "empty_causal_lm", "load_into", "pretrained_causal_lm"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Dtypes that convert directly to a parameter's dtype, unlike those of quantised weights.
_FLOATS = ("F64", "F32", "F16", "BF16")


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
        self.folder = _existing(folder)
        self.tensors: dict[str, StoredTensor] = {}
        for file, names in _files(self.folder).items():
            with _open(self.folder / file) as opened:
                present = opened.keys()
                absent = listed("missing tensors", set(names or ()) - set(present))
                if absent:
                    raise SetupError(
                        f"{str(self.folder / file)!r} is not the file that {_INDEX} describes: {absent[0]}. The files"
                        " of two models seem to be mixed. Write or download the folder again"
                    )
                for name in names or present:
                    header = opened.get_slice(name)
                    shape = tuple(header.get_shape())
                    if max(shape, default=0) >= 2**48:
                        raise SetupError(
                            f"{str(self.folder / file)!r} has the tensor {name[:200]!r} of shape {shape}, expected"
                            " dimensions below 2**48. Write or download the file again"
                        )
                    self.tensors[name] = StoredTensor(file, shape, header.get_dtype())

    def config(self) -> Any:
        """The folder's ``PretrainedConfig``.

        Raises:
            SetupError: the folder has no config, transformers does not know its model, or the weights are quantised.
        """
        path = self.folder / "config.json"
        if not path.is_file():
            raise SetupError(
                f"the folder {str(self.folder)!r} has no config.json. Copy or download all files of the model"
            )
        read_bounded_config(path)
        try:
            config: Any = _import("transformers").AutoConfig.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # any type, because each model class validates its own values
            reason = (
                str(error)[:1000] if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
            )
            raise SetupError(f"{str(path)!r} cannot be used: {reason[:1000]}") from error
        if getattr(config, "quantization_config", None) is not None:
            raise SetupError(
                f"the weights in {str(self.folder)!r} are quantised (config.json has a quantization_config), expected"
                " weights that can be trained. Use the original model that was quantised"
            )
        return config

    def match(self, model: nn.Module) -> dict[str, str]:
        """Match the tensors in the files to those of *model*.

        Names are mapped as in ``from_pretrained``: older names, the class's own conversions, and files of a base model
        without a head, which lack its prefix. A parameter with several names needs one of them in the files; the first
        one found is used. Names that the class declares as ignored are ignored, except for missing parameters.

        Args:
            model: the whole model, whose tensors need no memory.

        Returns:
            Names in the files, by a name in the model.

        Raises:
            SetupError: a tensor is missing or unexpected, or has another shape or kind. All are listed by the model's
                names.
        """
        stored = {own: name for name, own in _renamed(model, list(self.tensors), self.folder).items()}
        saved = model.state_dict().keys()
        tensors = _tensors(model)
        groups: dict[int, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            if name in saved:
                groups[id(tensor)].append(name)
        found: dict[str, str] = {}
        missing: list[str] = []
        for names in groups.values():
            first = next((name for name in names if name in stored), None)
            if first is None:
                missing.append(names[0])
            else:
                found[first] = stored[first]
        unexpected = [name for name in stored if name not in tensors]
        missing, unexpected = _not_ignored(model, missing, unexpected)
        problems = listed("missing in it", missing) + listed("unexpected in it", unexpected)
        problems += self._differences(found, tensors)
        if problems:
            raise SetupError(
                f"the folder {str(self.folder)!r} does not fit the {type(model).__name__}: {'; '.join(problems)}. Build"
                " the model from the folder's config.json, or use the folder to which this model was saved"
            )
        return found

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors, file by file.

        Args:
            names: names of tensors in the files, not in a model.

        Yields:
            A name, and the tensor on the CPU, in the file's dtype. It may be a view of the file: copy it.

        Raises:
            SetupError: a file can no longer be read.
        """
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.tensors[name].file].append(name)
        for file, wanted in by_file.items():
            with _open(self.folder / file) as opened:
                for name in wanted:
                    yield name, opened.get_tensor(name)

    def _differences(self, found: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[str]:
        sizes, kinds = [], []
        for own, name in found.items():
            stored, tensor = self.tensors[name], tensors[own]
            if stored.shape != tuple(tensor.shape):
                sizes.append(f"{own} ({list(stored.shape)}, expected {list(tensor.shape)})")
            elif (stored.dtype in _FLOATS) != tensor.is_floating_point():
                kinds.append(f"{own} ({stored.dtype}, expected a dtype that converts to {tensor.dtype})")
        return listed("of another size", sizes) + listed("of another kind", kinds)


def empty_causal_lm(config: Any, attention: str) -> nn.Module:
    """Causal LM with uninitialised parameters, which have no memory inside ``deferred_init``.

    No initialiser runs and no random number is drawn, so the model costs only the memory of its tensors. Parameters
    have torch's default dtype, as with ``from_pretrained``, not the dtype of the files that the config names. Buffers
    that the constructor computes have their values.

    Args:
        config: a ``PretrainedConfig``.
        attention: name of the attention implementation.

    Raises:
        SetupError: the model cannot be made, for example because its sizes overflow or exceed the memory.
    """
    try:
        with _import("transformers.modeling_utils").no_init_weights():
            model = _import("transformers").AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.get_default_dtype()
            )
    except (RuntimeError, ValueError) as error:
        raise SetupError(
            f"the {config.model_type} model of the config cannot be made: {str(error)[:1000]}. Check the config's sizes"
        ) from error
    model.tie_weights()  # skipped by no_init_weights
    return cast(nn.Module, model)


def pretrained_causal_lm(weights: PretrainedWeights, config: Any, attention: str) -> nn.Module:
    """Causal LM with the weights of a folder. Inside ``deferred_init`` its parameters have no memory.

    Files and model are compared before parameters take memory, so that a config that does not fit the files is rejected
    even if its model would be too large.

    Args:
        weights: weights of the whole model.
        config: a ``PretrainedConfig``.
        attention: name of the attention implementation.

    Raises:
        SetupError: see :func:`load_into`.
    """
    if not tensors_are_fake():
        with torch.device("meta"):
            weights.match(empty_causal_lm(config, attention))
    model = empty_causal_lm(config, attention)
    load_into(model, weights)
    return model


def load_into(model: nn.Module, weights: PretrainedWeights) -> None:
    """Load the tensors of *model* that have memory from the files. No other tensor is read.

    Values are converted to the dtype and device of the model's tensors. At most one tensor of a file is in memory at a
    time, in addition to the model's. No random numbers are drawn.

    Args:
        model: the whole model, under its own names. Tensors without memory are only checked. Inside ``deferred_init``
            this is the case for all tensors, after ``DeferredInit.materialise`` for the tensors of other ranks.
        weights: weights of the whole model.

    Raises:
        SetupError: the weights are not the model's (see :meth:`PretrainedWeights.match`), on every rank that sees the
            same files; a file cannot be read; or the model is on the meta device.
    """
    found, tensors = weights.match(model), _tensors(model)
    wanted = {name: tensors[own] for own, name in found.items() if not isinstance(tensors[own], FakeTensor)}
    if any(tensor.is_meta for tensor in wanted.values()):
        raise SetupError(
            f"the {type(model).__name__} was built on the meta device, so {str(weights.folder)!r} cannot be loaded into"
            " it. Build the model on a device that has memory"
        )
    with torch.no_grad():
        for name, value in weights.read(wanted):
            wanted[name].copy_(value)


# ---------------------------------------------------------------------- files


def _existing(folder: str | Path) -> Path:
    path = Path(folder)
    if path.is_dir():
        return path
    if path.is_file():
        raise SetupError(
            f"{str(folder)!r} is a file, expected a folder. Give the folder to which save_pretrained wrote the file"
        )
    on_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(folder))
    fix = (
        f"For a model on the Hugging Face Hub, run 'hf download {folder} --local-dir FOLDER' and give FOLDER"
        if on_hub
        else "Give the path of a folder that save_pretrained wrote"
    )
    raise SetupError(f"the folder {str(folder)!r} does not exist, and weights are only read from local folders. {fix}")


def _files(folder: Path) -> dict[str, list[str] | None]:
    """Files of the folder, with the names of the tensors to read from each file; None for all tensors."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: None}
    index = folder / _INDEX
    if not index.is_file():
        there = listed("it holds", [path.name for path in folder.iterdir()]) or ["it is empty"]
        raise SetupError(
            f"the folder {str(folder)!r} has neither {_SINGLE} nor {_INDEX} ({there[0]}). Convert other weights to"
            " safetensors with transformers: from_pretrained(...).save_pretrained(...)"
        )
    files: dict[str, list[str] | None] = {}
    for name, file in read_index(index).items():
        cast(list[str], files.setdefault(file, [])).append(name)
    absent = listed("missing", [file for file in files if not (folder / file).is_file()])
    if absent:
        raise SetupError(f"some files that {str(index)!r} names are {absent[0]}. Copy or download them too")
    return files


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    safetensors = _import("safetensors")
    try:
        check_header(path)
        with safetensors.safe_open(path, framework="pt", device="cpu") as opened:
            yield opened
    except (safetensors.SafetensorError, OSError, TypeError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SetupError(f"{str(path)!r} cannot be read: {reason}. Copy or download it again") from error


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SetupError(
            f"reading Hugging Face weights needs {module}, which is not installed. Run pip install 'lightning-pipe[hf]'"
        ) from error


# ---------------------------------------------------------------------- names


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names, in the order of the model."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _is_hugging_faces(model: nn.Module) -> bool:
    return hasattr(model, "_checkpoint_conversion_mapping")


def _renamed(model: Any, names: list[str], folder: Path) -> dict[str, str]:
    """Names in the model, by names in the files, as in transformers' ``PreTrainedModel._load_pretrained_model``."""
    if not _is_hugging_faces(model):
        return dict(zip(names, names, strict=True))
    prefix = model.base_model_prefix
    of_base_model = hasattr(model, prefix) and not any(name.startswith(prefix) for name in names)
    try:
        own: dict[str, str] = model._get_key_renaming_mapping(
            names,
            model._checkpoint_conversion_mapping,
            loading_task_model_from_base_state_dict=of_base_model,
        )
    except ValueError as error:
        raise SetupError(f"the names in the folder {str(folder)!r} cannot be mapped to the model: {error}") from error
    return own


def _not_ignored(model: Any, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """Remove names that the model's class allows to be missing or unexpected."""
    if not _is_hugging_faces(model):
        return missing, unexpected
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A parameter must not be missing, since no initialiser has run.
    needed = [name for name in missing if name in parameters]
    buffers, others = model._adjust_missing_and_unexpected_keys(
        [name for name in missing if name not in parameters], unexpected, False
    )
    return needed + buffers, others
