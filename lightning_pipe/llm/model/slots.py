"""Replacements of the modules of other stages, so that a stage runs the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_pipe.engine.common.errors import InputError

if TYPE_CHECKING:
    from lightning_pipe.llm.model.module_config import PPModuleConfig

_PLAIN = (str, int, float, bool, torch.dtype, type(None))


class PassThroughModule(nn.Module):
    """Replacement of a module of another stage, without parameters or buffers, that returns its first argument."""

    def __init__(self, replaced: nn.Module | None = None, outputs: int = 1) -> None:
        super().__init__()
        reserved = vars(self).keys() | {"forward", "replaced"}
        classes = () if replaced is None else type(replaced).__mro__[: type(replaced).__mro__.index(nn.Module)]
        for values in (*(vars(cls) for cls in reversed(classes)), {} if replaced is None else vars(replaced)):
            for name, value in values.items():
                if name not in reserved and not name.startswith("__") and isinstance(value, _PLAIN):
                    setattr(self, name, value)
        self.replaced, self._outputs = type(replaced).__name__, outputs
        self.train(replaced is None or replaced.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if 1 < self._outputs <= len(args):
            return args[: self._outputs]
        return args[0] if args else next(iter(kwargs.values()))


class PassThroughNonLayerModule(PassThroughModule):
    """Replacement of a module outside the layers of a causal LM, for operations whose results do not count.

    It returns its first floating-point argument, or zeros in the shape that an embedding or a linear layer returns.
    """

    def __init__(self, replaced: nn.Module, width: int, unused: str | None = None) -> None:
        super().__init__(replaced)
        self._unused = unused
        if isinstance(weight := getattr(replaced, "weight", None), torch.Tensor):
            self.weight: Any = SimpleNamespace(dtype=weight.dtype, device=weight.device)  # read by Mamba's forward
        self._embeds = isinstance(replaced, nn.Embedding)
        self._width: int = replaced.embedding_dim if isinstance(replaced, nn.Embedding) else width
        self._out = replaced.out_features if isinstance(replaced, nn.Linear) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._unused is not None:
            raise InputError(
                f"the model's forward calls {self._unused}, which only stage 0 holds; expected a batch of tokens only,"
                " since the other stages do not have what it is computed from. Leave its inputs out of the batch"
            )
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not tensors:
            raise TypeError(f"{self.replaced} is called without a tensor")
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
        if self._embeds or not first.is_floating_point():
            dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()
            return torch.zeros(*tensors[0].shape[:2], self._width, dtype=dtype, device=first.device)
        return first if self._out is None else first.new_zeros(*first.shape[:-1], self._out)


@dataclass
class StageHiddenStates:
    """Hidden states that a stage of a causal LM receives from the previous stage, and those that it leaves.

    The forward's own operations before the first layer (a sum with position embeddings, a scale) and after the last
    layer run on every stage. Their results count only on the first and on the last stage.
    """

    width: int = 0
    received: torch.Tensor | None = None
    entered: bool = False
    left: torch.Tensor | None = None


class PassThroughLayer(PassThroughModule):
    """Replacement of a layer of another stage of a causal LM."""

    def __init__(
        self, replaced: nn.Module, results: int, passage: StageHiddenStates, enters: bool, leaves: bool
    ) -> None:
        super().__init__(replaced)
        self.passage, self.enters, self.leaves, self._results = passage, enters, leaves, results

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(*args, **kwargs)
        if self.enters and self.passage.received is not None:
            hidden, self.passage.entered = self.passage.received, True
        if self.leaves and self.passage.left is None:
            self.passage.left = hidden
        return (hidden, *[None] * (self._results - 1)) if self._results else hidden


def build_stand_ins(
    model: nn.Module, config: PPModuleConfig, fqns_of_stage: Sequence[str]
) -> dict[str, PassThroughModule]:
    """Replacements of the listed modules that are not the stage's, by name."""
    local_fqns = set(fqns_of_stage)
    foreign = {name: model.get_submodule(name) for name in config.module_fqns if name not in local_fqns}
    if not is_causal_lm(model):
        return {name: PassThroughModule(module, config.layer_outputs) for name, module in foreign.items()}
    passage, trial = StageHiddenStates(get_token_embedding_width(model)), config.trial
    place = {name: i for i, name in enumerate(config.layer_fqns)}
    results, called = (0, config.module_fqns) if trial is None else (trial.layer_results, trial.called)
    local_layers = [index for name, index in place.items() if name in local_fqns]
    # Without a layer of its own, the first stage leaves at the first layer, and the last stage enters at the last one.
    first = local_layers[0] if local_layers else 0 if local_fqns & set(config.input_fqns) else config.num_layers
    last = local_layers[-1] if local_layers else config.num_layers if local_fqns & set(config.output_fqns) else -1
    return {
        name: PassThroughLayer(module, results, passage, place[name] < first, place[name] > last)
        if name in place
        else PassThroughNonLayerModule(module, passage.width, None if name in called else name)
        for name, module in foreign.items()
    }


def is_causal_lm(model: nn.Module) -> bool:
    """Return True if a model has the attributes of a Hugging Face causal LM, whatever its class."""
    return all(hasattr(model, name) for name in ("config", "base_model_prefix", "get_input_embeddings"))


def get_token_embedding_width(model: nn.Module) -> int:
    """Width of the token embedding of a Hugging Face causal LM."""
    width: int = model.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
    return width
