"""Names of a model's input modules, layers and output modules (FQNs), checked against the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_whole_number

NEEDED = (
    "get_pp_module_config() returns a dict of num_layers (an int), layer_prefix (the FQN of the list of layers, such as"
    " 'model.layers'), input_fqns and output_fqns (lists of the FQNs before and after it) and, if some modules are"
    " needed on every stage, always_keep_fqns; and, if layers take and return several tensors, layer_outputs"
)


@dataclass(frozen=True)
class TrialRun:
    """Result of a trial run of a Hugging Face causal LM, made by ``derived_config.refine_module_config_by_trial_run``.

    Attributes:
        called: names of the modules that were called on token ids, in order, once for each call.
        layer_results: number of results of a layer, of which the first is the hidden states; 0 for a tensor.
        starts_plain: True if the first layer receives given embeddings unchanged.
        ends_plain: True if the base model returns the result of the last layer, passed through the modules after it.
        logits_plain: True if the model returns the result of its head unchanged.
    """

    called: tuple[str, ...]
    layer_results: int
    starts_plain: bool
    ends_plain: bool
    logits_plain: bool


@dataclass(frozen=True)
class PPModuleConfig:
    """Names of a model's input modules, layers and output modules, in the order of its forward.

    Args:
        num_layers: number of layers.
        layer_prefix: FQN of the module that holds the layers under the names 0 to num_layers - 1, such as
            ``model.layers``; empty if the model itself holds them.
        input_fqns: FQNs of modules before the layers, such as the token embedding (default: none).
        output_fqns: FQNs of modules after the layers, such as the last norm and the head (default: none).
        always_keep_fqns: FQNs of modules that every stage holds, such as a rotary embedding (default: none). They must
            not have trained parameters.
        layer_outputs: number of tensors that each listed module takes as its first positional arguments and returns as
            a tuple (default 1). Layers that take and return one tuple need no number.
        trial: what a trial run of a Hugging Face model has found out. Set by
            ``derived_config.refine_module_config_by_trial_run``.
    """

    num_layers: int
    layer_prefix: str
    input_fqns: tuple[str, ...] = ()
    output_fqns: tuple[str, ...] = ()
    always_keep_fqns: tuple[str, ...] = ()
    layer_outputs: int = 1
    trial: TrialRun | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> PPModuleConfig:
        """Build the config from the result of a model's ``get_pp_module_config()``.

        Raises:
            SetupError: a key is unknown or missing, or a value has the wrong type.
        """
        if not isinstance(mapping, Mapping):
            raise SetupError(f"get_pp_module_config() returned {mapping!r}. Expected: {NEEDED}")
        field_names = [attribute.name for attribute in fields(cls) if attribute.compare]
        unknown = [str(key) for key in mapping if key not in field_names]
        missing = [key for key in field_names if key not in (*mapping, "always_keep_fqns", "layer_outputs")]
        if unknown or missing:
            wrong = ([f"the unknown {', '.join(unknown)}"] if unknown else []) + (
                [f"no {', '.join(missing)}"] if missing else []
            )
            raise SetupError(f"get_pp_module_config() returned {' and '.join(wrong)}. Expected: {NEEDED}")
        values = dict(mapping)
        for key, value in mapping.items():
            if key.endswith("_fqns"):
                if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
                    raise SetupError(f"get_pp_module_config() returned {key}={value!r}; expected a list of FQNs")
                values[key] = tuple(value)
        for key in ("num_layers", "layer_outputs"):
            check_whole_number(f"{key} of get_pp_module_config()", values.get(key, 1), 1)
        return cls(**values)

    def get_layer_fqn(self, index: int) -> str:
        """FQN of a layer."""
        return f"{self.layer_prefix}.{index}" if self.layer_prefix else str(index)

    @property
    def layer_fqns(self) -> tuple[str, ...]:
        """FQNs of all layers, in order."""
        return tuple(self.get_layer_fqn(index) for index in range(self.num_layers))

    @property
    def module_fqns(self) -> tuple[str, ...]:
        """FQNs of all modules that are assigned to stages, in the order of the forward."""
        return self.input_fqns + self.layer_fqns + self.output_fqns

    def check_against_model(self, model: nn.Module) -> None:
        """Check the config against the model.

        Raises:
            SetupError: the model lacks a name or has another number of layers; a module is listed twice or inside
                another; a parameter would be on no stage; or a trained parameter would be on every stage.
        """
        kind = type(model).__name__
        everything = dict(model.named_modules(remove_duplicate=False))
        named = [*self.input_fqns, *self.output_fqns, *self.always_keep_fqns]
        absent = [name for name in (self.layer_prefix, *named) if name not in everything]
        if absent:
            raise SetupError(
                f"the model's config names {', '.join(absent)}, which {kind} does not have; expected names of its"
                f" modules, such as {', '.join(list(everything)[1:9])}"
            )
        prefix = f"{self.layer_prefix}." if self.layer_prefix else ""
        layer_names = [name for name in everything[self.layer_prefix]._modules if prefix + name not in named]
        if sorted(layer_names) != sorted(str(index) for index in range(self.num_layers)):
            raise SetupError(
                f"the model's config has num_layers={self.num_layers}, but {self.layer_prefix or kind} holds"
                f" {len(layer_names)} ({', '.join(layer_names[:3])}{', ...' if len(layer_names) > 3 else ''}); expected"
                f" layers with the names 0 to num_layers - 1. Set num_layers to the number of layers that the model has"
            )
        listed = [*self.module_fqns, *self.always_keep_fqns]
        places = set(listed)
        repeated = {name for name in places if listed.count(name) > 1 or is_inside(name, places - {name})}
        if repeated:
            raise SetupError(
                f"the model's config lists {', '.join(sorted(repeated))} twice, directly or inside another listed"
                " module; expected each module once. Remove the others"
            )
        parameters = dict(model.named_parameters(remove_duplicate=False))
        homeless = [name for name in parameters if not is_inside(name, places)]
        if homeless:
            raise SetupError(
                f"{kind} has {', '.join(homeless[:5])}{', ...' if len(homeless) > 5 else ''}, in none of the modules"
                " that the model's config lists, so on no stage; expected every parameter in a listed module. Add its"
                " module to input_fqns or output_fqns, or put a bare parameter into a module"
            )
        shared = [
            name
            for name, parameter in parameters.items()
            if parameter.requires_grad and is_inside(name, set(self.always_keep_fqns))
        ]
        if shared:
            raise SetupError(
                f"{kind} has the trained parameter {', '.join(shared)} in always_keep_fqns, where each stage would"
                " train a separate copy; expected modules without trained parameters. List the module in input_fqns or"
                " output_fqns"
            )


def is_inside(name: str, modules: set[str]) -> bool:
    """Return True if a module or parameter is inside one of the modules, at any depth."""
    return any(name.startswith(f"{module}.") for module in modules)
