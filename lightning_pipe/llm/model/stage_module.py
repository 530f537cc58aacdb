"""The part of a model that one pipeline stage runs.

The model keeps its structure, its forward and its names; modules of other stages are replaced by ones that hand their
input on. So a stage runs the model's own code, and its checkpoint keys are the unsplit model's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
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
    "run_empty",
    "shallow_copy",
    "tied_parameters",
]

_PLAIN = (str, int, float, bool, torch.dtype, type(None))


class PassThrough(nn.Module):
    """Stands where a module of another stage was: no parameters, no buffers, its first argument is its result.

    Args:
        replaced: the module that was there. Its plain attributes (numbers, texts, dtypes) are kept, since a model's
            forward may read them: Qwen3's asks each layer for its ``attention_type``.
        as_tuple: return ``(x,)``, for layers that return a tuple of which the model takes the first, as GPT-NeoX's do.
    """

    def __init__(self, replaced: nn.Module | None = None, as_tuple: bool = False) -> None:
        super().__init__()
        own = vars(self).keys() | {"forward"}
        for name, value in vars(replaced).items() if replaced is not None else ():
            if name not in own and isinstance(value, _PLAIN):
                setattr(self, name, value)
        self.train(replaced is None or replaced.training)
        self._as_tuple = as_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passed = args[0] if args else next(iter(kwargs.values()))
        return (passed,) if self._as_tuple else passed


class StageModule(nn.Module):
    """What a ``PipelineStage`` runs, and the root for ``fully_shard``: a pruned model that is called as a stage.

    The first stage takes the model's inputs; every later one takes the hidden states of the stage before as its first
    argument. Keyword arguments go to the model's forward on every stage. A Hugging Face causal LM is called with
    ``input_ids=`` or ``inputs_embeds=`` and without a cache, and its result is one tensor: logits
    ``[batch, length, vocabulary]`` on the last stage, hidden states ``[batch, length, width]`` before it.

    Args:
        module: the model, pruned to this stage.
        stage_index: which stage it is, from 0.
        num_stages: stages of the whole pipeline.
    """

    def __init__(self, module: nn.Module, stage_index: int, num_stages: int) -> None:
        super().__init__()
        if not 0 <= stage_index < num_stages:
            raise SetupError(f"stage_index is {stage_index} of num_stages {num_stages}; needed is 0 to num_stages - 1")
        self.module = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self._causal_lm = is_causal_lm(module)
        self._has_cache = self._causal_lm and "use_cache" in inspect.signature(self._called().forward).parameters

    def _called(self) -> nn.Module:
        # What a causal LM does after its base model (scaling or capping logits) is the last stage's business alone.
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
            args: of the model on the first stage; hidden states on a later one.
            result_of: on the last stage, makes of the model's output what the stage returns: a loss, say. Here and not
                after the call, since parameters that FSDP shards are whole in here only.
            contexts: made, and entered around the model, on every stage.
            kwargs: of the model.
        """
        with ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context())
            output = self._run(*args, **kwargs)
        return output if result_of is None or self.stage_index < self.num_stages - 1 else result_of(output)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._causal_lm:
            return self.module(*args, **kwargs)
        if len(args) > 1:
            raise InputError(
                f"stage {self.stage_index} was called with {len(args)} positional arguments; a Hugging Face model takes"
                " one, token ids or hidden states: give the others as keywords"
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
    """What a run of a model in which every listed module passes through has shown.

    Args:
        called: FQNs of the modules that were called, in order.
        layers_return_tuple: the model takes the first item of what a layer returns; found for causal LMs only.
    """

    called: tuple[str, ...]
    layers_return_tuple: bool


def make_stage(
    model: nn.Module, config: ModuleConfig, fqns_of_stage: Sequence[str], stage_index: int, num_stages: int
) -> StageModule:
    """Make of a model the stage that holds the given modules.

    Args:
        model: the unsplit model; it is pruned in place and belongs to the stage afterwards. Give a
            :func:`shallow_copy` where the model is needed again.
        config: what the model is made of.
        fqns_of_stage: what this stage holds, as the functions of ``split`` return it.
        stage_index: which stage it is, from 0.
        num_stages: stages of the whole pipeline.

    Raises:
        SetupError: a name or index that there is not, or a causal LM that cannot be cut (see :func:`run_empty`).
    """
    prune(model, config, fqns_of_stage)
    return StageModule(model, stage_index, num_stages)


def prune(model: nn.Module, config: ModuleConfig, kept: Sequence[str]) -> None:
    """Replace, in place, every input, layer and output module that is not kept by one that passes through.

    Indices of lists, keys of dictionaries and state-dict keys of what is kept do not change.

    Args:
        model: the unsplit model.
        config: what the model is made of; what is in none of its lists, and what it always keeps, stays.
        kept: FQNs of what stays.

    Raises:
        SetupError: a kept name that the config does not list, or a causal LM that cannot be cut (:func:`run_empty`).
    """
    unknown = [name for name in kept if name not in set(config.modules)]
    if unknown:
        raise SetupError(
            f"the stage is to hold {', '.join(unknown)}, which the model's config does not list; it lists"
            f" {', '.join(config.modules)}"
        )
    as_tuple = is_causal_lm(model) and run_empty(model, config).layers_return_tuple
    _replace(model, config, kept, as_tuple)


def _replace(model: nn.Module, config: ModuleConfig, kept: Sequence[str], as_tuple: bool) -> dict[str, PassThrough]:
    layers = set(config.layers)
    foreign = {
        name: PassThrough(model.get_submodule(name), as_tuple and name in layers)
        for name in config.modules
        if name not in set(kept)
    }
    for name, stand_in in foreign.items():
        model.set_submodule(name, stand_in)
    return foreign


def run_empty(model: nn.Module, config: ModuleConfig, hidden: torch.Tensor | None = None, **kwargs: Any) -> EmptyRun:
    """Run the model with every listed module passing through, and see that hidden states come out as they went in.

    Whatever a forward does outside of its listed modules (GPT-2 adds position embeddings, Gemma scales the embedding)
    would be done again on every stage; here it shows, on a copy that holds no parameter of the model.

    Args:
        model: the unsplit model, on any device, the meta device included; it is left as it was.
        config: what the model is made of.
        hidden: hidden states on CPU in the shape that goes from stage to stage. A Hugging Face causal LM needs none.
        kwargs: keyword arguments that every stage is called with.

    Raises:
        SetupError: the hidden states come out changed, or the run fails.
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
        if isinstance(result, torch.Tensor) and result.shape == hidden.shape and torch.equal(result, hidden):
            return EmptyRun(tuple(called), as_tuple)
    failure = failures[0] if len(failures) == len(attempts) else None
    reason = "changes its input" if failure is None else f"fails with {type(failure).__name__}: {failure}"
    raise SetupError(
        f"{type(model).__name__} cannot be cut: with {', '.join(config.input_fqns + config.output_fqns)} and its layers"
        f" passing through, its forward {reason}; needed is a forward that then returns the hidden states it is given."
        " Move what else it does to them into one of those modules, a sum of two embeddings or a dropout on it say;"
        " Hugging Face's models that do so, such as GPT-2 and OPT, cannot be cut"
    ) from failure


def _run_shell(
    model: nn.Module, config: ModuleConfig, hidden: torch.Tensor, as_tuple: bool, kwargs: dict[str, Any]
) -> tuple[Any, list[str]]:
    shell = shallow_copy(model).train()
    called: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    for name, stand_in in _replace(shell, config, (), as_tuple).items():
        stand_in.register_forward_pre_hook(record(name))
    _empty_tensors(shell)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if is_causal_lm(shell):
            # As the first of two stages, so that neither logits nor what becomes of them is asked for.
            return StageModule(shell, 0, 2)(inputs_embeds=hidden, **kwargs), called
        return shell(hidden, **kwargs), called


def shallow_copy(model: nn.Module) -> nn.Module:
    """A copy with module objects of its own, over the very same parameters and buffers.

    So several stages can be pruned from one model, each by itself, and no tensor is copied.
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
    """Whether a model looks like one of Hugging Face's, told by what it has and not by its class."""
    return all(hasattr(model, name) for name in ("config", "base_model_prefix", "get_input_embeddings"))


def base_model(model: nn.Module) -> nn.Module:
    """The model without its head, of a Hugging Face model."""
    base = getattr(model, str(model.base_model_prefix), model)
    assert isinstance(base, nn.Module)
    return base


def _tensor(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def _some_hidden_states(model: nn.Module) -> torch.Tensor:
    """Two sequences of three tokens: the fewest in which the loss of either dimension shows."""
    width = model.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
    return torch.linspace(-1.0, 1.0, 6 * width, dtype=torch.float32, device="cpu").view(2, 3, width)


def _empty_tensors(shell: nn.Module) -> None:
    """Give what a pruned copy still holds (rotary frequencies) memory on CPU: the model's may have none yet."""
    for module in shell.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for values in held:
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    zeros = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
                    values[name] = nn.Parameter(zeros, False) if isinstance(value, nn.Parameter) else zeros
