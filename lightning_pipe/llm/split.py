"""Which modules of a model each pipeline stage holds, by fully-qualified name (FQN).

A model says what it is made of, or it is seen from its structure (:class:`ModuleConfig`); the functions here deal its
layers out to stages. Layers keep their order and their names, so a stage's checkpoint keys are the unsplit model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from lightning_pipe.engine.errors import SetupError
from lightning_pipe.llm.stage_module import base_model, is_causal_lm, run_empty

__all__ = ["ModuleConfig", "derive_config", "split_at", "split_by_cost", "split_by_ranges", "split_evenly"]

_NEEDED = (
    "get_pp_module_config() returns a dict of num_layers (an int), layer_prefix (the FQN of the list of layers, such as"
    " 'model.layers'), input_fqns and output_fqns (lists of the FQNs before and after it) and, if some modules are"
    " needed on every stage, always_keep_fqns"
)


@dataclass(frozen=True)
class ModuleConfig:
    """What a model is made of, in the order of its forward: input modules, layers, output modules.

    Args:
        num_layers: number of layers.
        layer_prefix: FQN of what holds the layers under the names 0 to num_layers - 1, such as ``model.layers``; empty
            where that is the model itself.
        input_fqns: modules before the layers, such as the token embedding.
        output_fqns: modules after them, such as the last norm and the head.
        always_keep_fqns: modules that every stage holds, such as a rotary embedding; nothing in them is trained.
    """

    num_layers: int
    layer_prefix: str
    input_fqns: tuple[str, ...] = ()
    output_fqns: tuple[str, ...] = ()
    always_keep_fqns: tuple[str, ...] = ()

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> ModuleConfig:
        """The config that a model's ``get_pp_module_config()`` returned.

        Raises:
            SetupError: a key that is not one of the above, one that is missing, or a value of another type.
        """
        if not isinstance(given, Mapping):
            raise SetupError(f"get_pp_module_config() returned {given!r}; needed: {_NEEDED}")
        known = [field.name for field in fields(cls)]
        unknown = [str(key) for key in given if key not in known]
        missing = [key for key in known if key not in given and key != "always_keep_fqns"]
        if unknown or missing:
            wrong = ([f"the unknown {', '.join(unknown)}"] if unknown else []) + (
                [f"no {', '.join(missing)}"] if missing else []
            )
            raise SetupError(f"get_pp_module_config() returned {' and '.join(wrong)}; needed: {_NEEDED}")
        values = dict(given)
        for key, value in given.items():
            if key.endswith("_fqns"):
                if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
                    raise SetupError(f"get_pp_module_config() returned {key}={value!r}; needed is a list of FQNs")
                values[key] = tuple(value)
        layers, prefix = values["num_layers"], values["layer_prefix"]
        if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
            raise SetupError(f"get_pp_module_config() returned num_layers={layers!r}; needed is an int of 1 or more")
        if not isinstance(prefix, str):
            raise SetupError(f"get_pp_module_config() returned layer_prefix={prefix!r}; needed is an FQN as a str")
        return cls(**values)

    def layer(self, index: int) -> str:
        """FQN of a layer."""
        return f"{self.layer_prefix}.{index}" if self.layer_prefix else str(index)

    @property
    def layers(self) -> tuple[str, ...]:
        """FQNs of all layers, in order."""
        return tuple(self.layer(index) for index in range(self.num_layers))

    @property
    def modules(self) -> tuple[str, ...]:
        """FQNs of all that is dealt out to stages, in the order of the forward."""
        return self.input_fqns + self.layers + self.output_fqns

    def check(self, model: nn.Module) -> None:
        """Compare with the model itself.

        Raises:
            SetupError: a name that the model does not have, another number of layers, a module listed twice or inside
                another, parameters that no stage or that every stage would hold.
        """
        kind = type(model).__name__
        everything = dict(model.named_modules(remove_duplicate=False))
        named = [*self.input_fqns, *self.output_fqns, *self.always_keep_fqns]
        absent = [name for name in (self.layer_prefix, *named) if name not in everything]
        if absent:
            raise SetupError(
                f"the model's config names {', '.join(absent)}, which {kind} does not have; needed are names of its"
                f" modules, such as {', '.join(list(everything)[1:9])}"
            )
        prefix = f"{self.layer_prefix}." if self.layer_prefix else ""
        found = [name for name, _ in everything[self.layer_prefix].named_children() if prefix + name not in named]
        if sorted(found) != sorted(str(index) for index in range(self.num_layers)):
            raise SetupError(
                f"the model's config says num_layers={self.num_layers}, but {self.layer_prefix or kind} holds"
                f" {len(found)} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''}); needed are layers with the"
                f" names 0 to num_layers - 1: give the number that the model has"
            )
        listed = [*self.modules, *self.always_keep_fqns]
        places = set(listed)
        repeated = {name for name in places if listed.count(name) > 1 or _is_inside(name, places - {name})}
        if repeated:
            raise SetupError(
                f"the model's config lists {', '.join(sorted(repeated))} twice, by itself or inside another listed"
                " module; needed is each module in one place only"
            )
        parameters = dict(model.named_parameters(remove_duplicate=False))
        homeless = [name for name in parameters if not _is_inside(name, places)]
        if homeless:
            raise SetupError(
                f"{kind} has {', '.join(homeless[:5])}{', ...' if len(homeless) > 5 else ''}, in none of the modules"
                " that the model's config lists, so on no stage; needed is every parameter in a listed module: name"
                " theirs in input_fqns or output_fqns, or put a bare parameter into a module"
            )
        shared = [
            name
            for name, parameter in parameters.items()
            if parameter.requires_grad and _is_inside(name, set(self.always_keep_fqns))
        ]
        if shared:
            raise SetupError(
                f"{kind} has the trained parameter {', '.join(shared)} in always_keep_fqns, where each stage would"
                " train a copy of its own; needed there are modules with nothing to train: list it in input_fqns or"
                " output_fqns"
            )


def derive_config(model: nn.Module) -> ModuleConfig:
    """What a model is made of: as its ``get_pp_module_config()`` says, or as a known structure shows.

    Known are a plain ``nn.Sequential`` and causal LMs of Hugging Face (Llama, Qwen3, GPT-NeoX and their like).

    Raises:
        SetupError: the model does not say and is none of these, or it does not hold what its config names.
    """
    if callable(own := getattr(model, "get_pp_module_config", None)):
        config = ModuleConfig.from_mapping(own())
    elif isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        config = ModuleConfig(len(model), "")
    elif is_causal_lm(model):
        config = _causal_lm_config(model)
    else:
        raise SetupError(
            f"{type(model).__name__} does not say what its stages are made of, and is neither an nn.Sequential nor a"
            f" Hugging Face causal LM; needed: {_NEEDED}"
        )
    config.check(model)
    return config


def _causal_lm_config(model: nn.Module) -> ModuleConfig:
    """Structure of a Hugging Face causal LM, told by its accessors and by what runs before and after its layers."""
    names = {id(module): name for name, module in model.named_modules()}
    lists = {names[id(module)]: module for module in base_model(model).modules() if isinstance(module, nn.ModuleList)}
    outermost = {name: layers for name, layers in lists.items() if not _is_inside(name, lists.keys() - {name})}
    if not outermost:
        raise SetupError(f"{type(model).__name__} has no ModuleList of layers; needed: {_NEEDED}")
    layer_prefix, layers = max(outermost.items(), key=lambda item: len(item[1]))
    before: list[str] = []
    after: list[str] = []
    everywhere: list[str] = []
    side = before
    for child in model.get_submodule(layer_prefix.rpartition(".")[0]).children():
        if child is layers:
            side = after
        elif next(child.parameters(), None) is None and next(child.buffers(), None) is not None:
            everywhere.append(names[id(child)])
        else:
            side.append(names[id(child)])
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None:
        after.append(names[id(head)])
    config = ModuleConfig(len(layers), layer_prefix, tuple(before), tuple(after), tuple(everywhere))
    config.check(model)
    # Registration may tell another order than forward: Phi registers the dropout of its embedding after its layers.
    called = run_empty(model, config).called
    first = called.index(config.layer(0)) if config.layer(0) in called else len(called)
    early = [name for name in called[:first] if name in after]
    late = [name for name in called[first:] if name in before]
    return replace(
        config,
        input_fqns=tuple(name for name in before if name not in late) + tuple(early),
        output_fqns=tuple(late) + tuple(name for name in after if name not in early),
    )


def split_evenly(
    config: ModuleConfig, num_stages: int, input_weight: int = 1, output_weight: int = 1
) -> list[list[str]]:
    """Split into stages of as many layers each, where input and output modules count as layers, too.

    ``num_layers + input_weight + output_weight`` effective layers go evenly to the stages, and one of the remainder to
    each of the first stages: the rule of torchtitan's and xorl's ``generate_llm_fqn_per_model_part``. A model without
    input or output modules has none to count.

    Args:
        config: what the model is made of.
        num_stages: stages of the whole pipeline.
        input_weight: layers that the input modules count as.
        output_weight: layers that the output modules count as.

    Returns:
        FQNs of each stage in the order of the forward, without what every stage holds.

    Raises:
        SetupError: fewer layers than stages, or weights that leave a stage less than nothing.
    """
    _check_stages(config, num_stages)
    for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
        if not isinstance(weight, int) or weight < 0:
            raise SetupError(f"{name} is {weight!r}; needed is a whole number of layers, 0 or more")
    extra_work = [0] * num_stages
    extra_work[0] += input_weight if config.input_fqns else 0
    extra_work[-1] += output_weight if config.output_fqns else 0
    share, remainder = divmod(config.num_layers + sum(extra_work), num_stages)
    counts = [share + (stage < remainder) - extra for stage, extra in enumerate(extra_work)]
    for stage, count in enumerate(counts):
        if count < 0:
            raise SetupError(
                f"{config.num_layers} layers with input_weight={input_weight} and output_weight={output_weight} over"
                f" {num_stages} stages leave {count} layers for stage {stage}; needed are 0 or more for each stage:"
                " take fewer stages, smaller weights, or give the layers of each stage"
            )
    return split_at(config, counts)


def split_at(config: ModuleConfig, layers_per_stage: Sequence[int]) -> list[list[str]]:
    """Split into stages of the given numbers of layers.

    Args:
        config: what the model is made of.
        layers_per_stage: number of layers of each stage, in order.

    Returns:
        FQNs of each stage, as :func:`split_evenly`.

    Raises:
        SetupError: numbers that do not add up to the model's layers, or a stage that holds nothing.
    """
    counts = list(layers_per_stage)
    _check_stages(config, len(counts))
    if not all(isinstance(count, int) and count >= 0 for count in counts) or sum(counts) != config.num_layers:
        raise SetupError(
            f"layers_per_stage is {counts}; needed are whole numbers, 0 or more, that add up to the model's"
            f" {config.num_layers} layers"
        )
    empty = [stage for stage in range(len(counts)) if _is_empty(config, stage, counts)]
    if empty:
        raise SetupError(
            f"layers_per_stage {counts} leaves stage {', '.join(map(str, empty))} empty; needed is at least a layer on"
            " every stage, or the input modules on the first or the output modules on the last"
        )
    ends = [0, *accumulate(counts)]
    stages = [[config.layer(index) for index in range(first, end)] for first, end in pairwise(ends)]
    stages[0] = [*config.input_fqns, *stages[0]]
    stages[-1] = [*stages[-1], *config.output_fqns]
    return stages


def split_by_ranges(config: ModuleConfig, ranges: Sequence[tuple[int, int]]) -> list[list[str]]:
    """Split into stages of the given ranges of layers.

    Args:
        config: what the model is made of.
        ranges: of each stage, in order, its first layer and the one after its last.

    Returns:
        FQNs of each stage, as :func:`split_evenly`.

    Raises:
        SetupError: ranges that leave out or repeat a layer, or a stage that holds nothing.
    """
    given = [tuple(bounds) for bounds in ranges]
    ends = [0, *(bounds[-1] if bounds else 0 for bounds in given)]
    if given != list(pairwise(ends)) or ends[-1] != config.num_layers:
        raise SetupError(
            f"the ranges of layers are {given}; needed are pairs (first, one after the last), each beginning where the"
            f" one before ends, from 0 to the model's {config.num_layers} layers"
        )
    return split_at(config, [end - first for first, end in pairwise(ends)])


def split_by_cost(
    config: ModuleConfig,
    num_stages: int,
    layer_costs: Sequence[float],
    input_cost: float = 0.0,
    output_cost: float = 0.0,
) -> list[list[str]]:
    """Split so that the most expensive stage costs the least, since the slowest stage sets the pipeline's pace.

    Among several such splits, the most even one (least sum of squared costs), then the one that cuts earliest.

    Args:
        config: what the model is made of.
        num_stages: stages of the whole pipeline.
        layer_costs: cost of each layer, in seconds, bytes or any other unit.
        input_cost: cost of the input modules, in the same unit.
        output_cost: cost of the output modules, in the same unit.

    Returns:
        FQNs of each stage, as :func:`split_evenly`.

    Raises:
        SetupError: fewer layers than stages, not a cost for each layer, or a cost that is negative or not finite.
    """
    _check_stages(config, num_stages)
    costs = [input_cost, *layer_costs, output_cost]
    if len(layer_costs) != config.num_layers or not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise SetupError(
            f"layer_costs has {len(layer_costs)} numbers, and with input_cost and output_cost they go from"
            f" {min(costs)} to {max(costs)}; needed is one for each of the model's {config.num_layers} layers, all"
            " finite and not negative"
        )

    def cost(stage: int, first: int, end: int) -> float:
        around = (input_cost if stage == 0 else 0.0) + (output_cost if stage == num_stages - 1 else 0.0)
        return math.fsum([around, *layer_costs[first:end]])

    def best(limit: float, worst_only: bool) -> tuple[float, list[int]]:
        """Least score over all cuts whose stages cost no more than the limit, and the layers where its stages end."""
        reached: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by the layer where the stages so far end
        for stage in range(num_stages):
            last = stage == num_stages - 1
            may_be_empty = bool((stage == 0 and config.input_fqns) or (last and config.output_fqns))
            further: dict[int, tuple[float, list[int]]] = {}
            for first, (score, ends) in sorted(reached.items()):
                for end in range(first + (not may_be_empty), config.num_layers + 1):
                    here = cost(stage, first, end)
                    if here <= limit:
                        total = max(score, here) if worst_only else score + here * here
                        further[end] = min(further.get(end, (math.inf, [])), (total, [*ends, end]))
            reached = further
        return reached[config.num_layers]

    limit, _ = best(math.inf, worst_only=True)
    _, ends = best(limit, worst_only=False)
    return split_at(config, [end - first for first, end in pairwise([0, *ends])])


def _check_stages(config: ModuleConfig, num_stages: int) -> None:
    if not 1 <= num_stages <= config.num_layers:
        raise SetupError(
            f"{config.num_layers} layers cannot go to {num_stages} stages; needed is 1 to {config.num_layers} stages:"
            " lower pipeline_parallel_size or the stages of each rank"
        )


def _is_empty(config: ModuleConfig, stage: int, counts: Sequence[int]) -> bool:
    own = (config.input_fqns if stage == 0 else ()) + (config.output_fqns if stage == len(counts) - 1 else ())
    return counts[stage] == 0 and not own


def _is_inside(name: str, modules: set[str]) -> bool:
    """Whether a module or parameter lies in one of the modules, at any depth."""
    return any(name.startswith(f"{module}.") for module in modules)
