"""The part of a model that one pipeline stage runs.

The model keeps its structure, its forward and its names; modules of other stages are replaced by modules that return
their input. A stage therefore runs the model's own code, and its checkpoint keys are those of the unsplit model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_pipe.engine.common.errors import InputError, SetupError

if TYPE_CHECKING:
    from lightning_pipe.llm.model.module_config import ModuleConfig

__all__ = [
    "EmptyRun",
    "PassThrough",
    "StageModule",
    "base_model",
    "is_causal_lm",
    "make_stage",
    "prune",
    "registered_tensors",
    "replace_tensors",
    "run_empty",
    "shallow_copy",
    "tied_parameters",
]

_PLAIN = (str, int, float, bool, torch.dtype, type(None))
Hidden = torch.Tensor | tuple[torch.Tensor, ...]


class PassThrough(nn.Module):
    """Replacement of a module of another stage, without parameters or buffers, that returns its first argument.

    Args:
        replaced: replaced module (default None). Its plain attributes (numbers, strings, dtypes) are copied, since a
            model's forward may read them: Qwen3's reads the ``attention_type`` of each layer.
        as_tuple: return ``(x,)`` instead of ``x`` (default False), for layers that return a tuple whose first item the
            model uses, such as GPT-NeoX's.
        outputs: number of tensors that modules hand on (default 1). Called with as many positional arguments, a module
            returns these as a tuple.
    """

    def __init__(self, replaced: nn.Module | None = None, as_tuple: bool = False, outputs: int = 1) -> None:
        super().__init__()
        own = vars(self).keys() | {"forward"}
        for name, value in vars(replaced).items() if replaced is not None else ():
            if name not in own and isinstance(value, _PLAIN):
                setattr(self, name, value)
        self.train(replaced is None or replaced.training)
        self._as_tuple = as_tuple
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if 1 < self._outputs <= len(args):
            return args[: self._outputs]
        passed = args[0] if args else next(iter(kwargs.values()))
        return (passed,) if self._as_tuple else passed


class StageModule(nn.Module):
    """Pruned model that is called as a stage. A ``PipelineStage`` runs it, and it is the root for ``fully_shard``.

    The first stage takes the model's inputs. Every later stage takes the hidden states of the previous stage as its
    first argument. Keyword arguments are passed to the model's forward on every stage. A Hugging Face causal LM is
    called with ``input_ids=`` or ``inputs_embeds=`` and without a cache, and returns one tensor: logits
    ``[batch, length, vocabulary]`` on the last stage, hidden states ``[batch, length, width]`` on the others.

    Args:
        module: model pruned to this stage.
        stage_index: index of the stage, from 0.
        num_stages: number of stages of the whole pipeline.
        packs: True to pass several received tensors as one tuple (default False).
    """

    def __init__(self, module: nn.Module, stage_index: int, num_stages: int, *, packs: bool = False) -> None:
        super().__init__()
        if not 0 <= stage_index < num_stages:
            raise SetupError(f"stage_index is {stage_index} of num_stages {num_stages}; expected 0 to num_stages - 1")
        self.module = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self._packs = packs and stage_index > 0
        self._causal_lm = is_causal_lm(module)
        self._has_cache = self._causal_lm and "use_cache" in inspect.signature(self._called().forward).parameters

    def _called(self) -> nn.Module:
        # Only the last stage runs the operations of a causal LM after its base model (scaling or capping logits).
        return self.module if self.stage_index == self.num_stages - 1 else base_model(self.module)

    def forward(
        self,
        *args: Any,
        result_of: Callable[[Any], Any] | None = None,
        contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
        **kwargs: Any,
    ) -> Any:
        """Run the stage.

        Args:
            args: positional arguments of the model on the first stage, hidden states on a later stage.
            result_of: function that the last stage applies to the model's output, such as a loss (default None). It is
                applied inside the forward, since parameters sharded by FSDP are only whole there.
            contexts: factories of context managers to enter around the model, on every stage.
            kwargs: keyword arguments of the model.
        """
        with ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context())
            output = self._run(*args, **kwargs)
        return output if result_of is None or self.stage_index < self.num_stages - 1 else result_of(output)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._causal_lm:
            return self.module(args, **kwargs) if self._packs and len(args) > 1 else self.module(*args, **kwargs)
        if len(args) > 1:
            raise InputError(
                f"stage {self.stage_index} was called with {len(args)} positional arguments; a Hugging Face model takes"
                " only one, token ids or hidden states. Pass the others as keywords"
            )
        if args:
            kwargs["inputs_embeds" if self.stage_index else "input_ids"] = args[0]
        if self._has_cache:
            kwargs["use_cache"] = False
        return _tensor(self._called()(**kwargs))

    def extra_repr(self) -> str:
        return f"stage {self.stage_index} of {self.num_stages}"


@dataclass(frozen=True)
class EmptyRun:
    """Result of a run of a model in which every listed module passes its input through.

    Args:
        called: FQNs of the modules that were called, in order.
        layers_return_tuple: True if the model uses the first item of the tuple that a layer returns. Detected for
            causal LMs only.
    """

    called: tuple[str, ...]
    layers_return_tuple: bool


def make_stage(
    model: nn.Module, config: ModuleConfig, fqns_of_stage: Sequence[str], stage_index: int, num_stages: int
) -> StageModule:
    """Make a model into the stage that holds the given modules.

    Args:
        model: unsplit model, which is pruned in place and belongs to the stage afterwards. Pass a
            :func:`shallow_copy` if the model is needed again.
        config: names of the model's modules.
        fqns_of_stage: FQNs of the modules of this stage, as returned by the functions in ``split``.
        stage_index: index of the stage, from 0.
        num_stages: number of stages of the whole pipeline.

    Raises:
        SetupError: the index does not exist; see also :func:`prune`.
    """
    prune(model, config, fqns_of_stage)
    return StageModule(model, stage_index, num_stages, packs=True)


def prune(model: nn.Module, config: ModuleConfig, kept: Sequence[str]) -> None:
    """Replace, in place, every input, layer and output module that is not in ``kept`` by a :class:`PassThrough`.

    List indices, dictionary keys and state-dict keys of the kept modules do not change.

    Args:
        model: unsplit model.
        config: names of the model's modules. Modules that it does not list, or always keeps, are not replaced.
        kept: FQNs of the modules to keep.

    Raises:
        SetupError: the config does not list a kept name, or the model is a causal LM that cannot be cut
            (:func:`run_empty`).
    """
    unknown = [name for name in kept if name not in set(config.modules)]
    if unknown:
        raise SetupError(
            f"the stage should hold {', '.join(unknown)}, which the model's config does not list; expected names from"
            f" {', '.join(config.modules)}"
        )
    as_tuple = is_causal_lm(model) and run_empty(model, config).layers_return_tuple
    _replace(model, config, kept, as_tuple)


def _replace(model: nn.Module, config: ModuleConfig, kept: Sequence[str], as_tuple: bool) -> dict[str, PassThrough]:
    layers = set(config.layers)
    foreign = {
        name: PassThrough(model.get_submodule(name), as_tuple and name in layers, config.layer_outputs)
        for name in config.modules
        if name not in set(kept)
    }
    for name, placeholder in foreign.items():
        model.set_submodule(name, placeholder)
    return foreign


def run_empty(model: nn.Module, config: ModuleConfig, hidden: Hidden | None = None, **kwargs: Any) -> EmptyRun:
    """Run the model with every listed module passing its input through, and check that hidden states do not change.

    Operations of a forward outside its listed modules (GPT-2 adds position embeddings, Gemma scales the embedding)
    would be repeated on every stage. This run detects them, on a copy without the model's parameters.

    Args:
        model: unsplit model on any device, including the meta device. It is not changed.
        config: names of the model's modules.
        hidden: hidden states on the CPU, in the shape that stages exchange, a tuple if there are several (default None,
            for Hugging Face causal LMs).
        kwargs: keyword arguments of every stage.

    Raises:
        SetupError: the hidden states change, or the run fails.
    """
    failures: list[Exception] = []
    attempts = (False, True) if is_causal_lm(model) else (False,)
    hidden = _some_hidden_states(model) if hidden is None else hidden
    for as_tuple in attempts:
        try:
            result, called = _run_shell(model, config, hidden, as_tuple, kwargs)
        except Exception as error:
            failures.append(error)
            continue
        given, found = (one if isinstance(one, tuple) else (one,) for one in (hidden, result))
        if len(given) == len(found) and all(map(_same, given, found)):
            return EmptyRun(tuple(called), as_tuple)
    failure = failures[0] if len(failures) == len(attempts) else None
    reason = "changes its input" if failure is None else f"fails with {type(failure).__name__}: {failure}"
    raise SetupError(
        f"{type(model).__name__} cannot be cut: with {', '.join(config.input_fqns + config.output_fqns)} and its layers"
        f" passing through, its forward {reason}; expected a forward that then returns the hidden states unchanged."
        " Move its other operations on them, such as a sum of two embeddings or a dropout, into one of those modules."
        " If layers take and return several tensors, set layer_outputs in the config to their number."
        " Hugging Face models with such operations, such as GPT-2 and OPT, cannot be cut"
    ) from failure


def _same(given: torch.Tensor, found: Any) -> bool:
    return isinstance(found, torch.Tensor) and found.shape == given.shape and torch.equal(found, given)


def _run_shell(
    model: nn.Module, config: ModuleConfig, hidden: Hidden, as_tuple: bool, kwargs: dict[str, Any]
) -> tuple[Any, list[str]]:
    shell = shallow_copy(model).train()
    called: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    for name, placeholder in _replace(shell, config, (), as_tuple).items():
        placeholder.register_forward_pre_hook(record(name))
    # Tensors of the shell, such as rotary frequencies, may have no memory yet.
    replace_tensors(shell, lambda one: torch.zeros(one.shape, dtype=one.dtype, device="cpu"))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if is_causal_lm(shell):
            # Run as the first of two stages, so that no logits are computed.
            return StageModule(shell, 0, 2)(inputs_embeds=hidden, **kwargs), called
        return shell(hidden, **kwargs), called


def shallow_copy(model: nn.Module) -> nn.Module:
    """Copy of a model with new module objects over the same parameters and buffers.

    Several stages can be pruned from copies of one model without copying tensors.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor):
                memo[id(value)] = value
    return copy.deepcopy(model, memo)


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Groups of FQNs that are one parameter, such as an embedding and a head that share their weight."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def is_causal_lm(model: nn.Module) -> bool:
    """Return True if a model has the attributes of a Hugging Face causal LM, whatever its class."""
    return all(hasattr(model, name) for name in ("config", "base_model_prefix", "get_input_embeddings"))


def base_model(model: nn.Module) -> nn.Module:
    """Base model of a Hugging Face model, without its head."""
    base = getattr(model, str(model.base_model_prefix), model)
    assert isinstance(base, nn.Module)
    return base


def _tensor(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def _some_hidden_states(model: nn.Module) -> torch.Tensor:
    """Hidden states of two sequences of three tokens: sizes above 1, so that losing either dimension is detected."""
    width = model.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
    return torch.linspace(-1.0, 1.0, 6 * width, dtype=torch.float32, device="cpu").view(2, 3, width)


def replace_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a model's parameters, buffers and plain attributes, in place; *make* is called once for each tensor."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for values in held:
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    if id(value) not in made:
                        bare, is_parameter = make(value), isinstance(value, nn.Parameter)
                        made[id(value)] = nn.Parameter(bare, value.requires_grad) if is_parameter else bare
                    values[name] = made[id(value)]


def registered_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, under all their names, in the order of the model."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
