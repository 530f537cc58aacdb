"""The part of a model that one pipeline stage runs.

The model keeps its structure, its forward and its names; modules of other stages are replaced by modules that return
their input. A stage therefore runs the model's own code, and its checkpoint keys are those of the unsplit model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_pipe._compat.torch import FakeTensor
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.losses.balance_loss import BalanceLoss
from lightning_pipe.llm.losses.router_losses import current_router_losses
from lightning_pipe.llm.model.slots import (
    PassThroughLayer,
    PassThroughModule,
    StageHiddenStates,
    build_stand_ins,
    is_causal_lm,
)

if TYPE_CHECKING:
    from lightning_pipe.llm.model.module_config import PPModuleConfig

__all__ = [
    "PassThroughModule",
    "StageModule",
    "check_no_ops_outside_modules",
    "copy_model_sharing_tensors",
    "copy_tensor_attributes",
    "get_hf_base_model",
    "is_causal_lm",
    "make_stage_module",
    "named_parameters_and_buffers",
    "output_tensor",
    "replace_module_tensors",
    "replace_modules_of_other_stages",
    "sentinel_like",
    "takes_cache",
    "tied_parameters",
]

Hidden = torch.Tensor | tuple[torch.Tensor, ...]


class StageModule(nn.Module):
    """Pruned model that is called as a stage. A ``PipelineStage`` runs it, and it is the root for ``fully_shard``.

    The first stage takes the model's inputs. Every later stage takes the hidden states of the previous stage as its
    first argument. Keyword arguments are passed to the model's forward on every stage. A Hugging Face causal LM is
    called with ``input_ids=`` or ``inputs_embeds=`` and without a cache, and returns one tensor: logits
    ``[batch, length, vocabulary]`` on the last stage, hidden states ``[batch, length, width]`` on the others.
    """

    def __init__(self, module: nn.Module, stage_index: int, num_stages: int, *, packs: bool = False) -> None:
        super().__init__()
        self.module = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self._packs = packs and stage_index > 0
        self._causal_lm = is_causal_lm(module)
        self._has_cache = self._causal_lm and takes_cache(self._get_model_or_base_model())
        slots = [submodule for submodule in module.modules() if isinstance(submodule, PassThroughLayer)]
        self._passage = slots[0].passage if slots else StageHiddenStates()
        self._enters = stage_index > 0 and any(slot.enters for slot in slots)
        self._leaves = any(slot.leaves for slot in slots)
        self.balance = BalanceLoss.from_model(module) if self._causal_lm else None

    def _get_model_or_base_model(self) -> nn.Module:
        # Only the last stage runs the operations of a causal LM after its base model (scaling or capping logits).
        return self.module if self.stage_index == self.num_stages - 1 else get_hf_base_model(self.module)

    def forward(
        self,
        *args: Any,
        result_of: Callable[[Any], Any] | None = None,
        contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
        **kwargs: Any,
    ) -> Any:
        """Run the stage."""
        with ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context())
            losses = current_router_losses()
            if not self._causal_lm:
                packed = (args,) if self._packs and len(args) > 1 else args
                output = self.module(*packed, **kwargs)
            elif self.balance is None:
                output = self._run(*args, **kwargs)
            else:
                first, *sums = args
                with self.balance.capture_router_logits(get_hf_base_model(self.module)) as logits:
                    output = self._run(first, **kwargs)
                counted = None if losses is None else losses.token_mask
                total = self.balance.add_router_logits_to_sums(
                    sums[0] if sums else self.balance.create_zero_sums(first.device), logits, counted
                )
        if self.stage_index < self.num_stages - 1:
            return output if self.balance is None else (output, total)
        result = output if result_of is None else result_of(output)
        if self.balance is None or losses is None:
            return result
        return result + losses.scale * losses.tokens * self.balance.compute_from_sums(total)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            raise InputError(
                f"stage {self.stage_index} was called with {len(args)} positional arguments; a Hugging Face model takes"
                " only one, token ids or hidden states. Pass the others as keywords"
            )
        if args and self._enters:  # the hidden states enter at a layer
            kwargs["inputs_embeds"] = args[0].new_zeros(*args[0].shape[:2], self._passage.width)
        elif args:
            kwargs["inputs_embeds" if self.stage_index else "input_ids"] = args[0]
        if self._has_cache:
            kwargs["use_cache"] = False
        try:
            self._passage.received = args[0] if self._enters else None
            output = self._get_model_or_base_model()(**kwargs)
            if self._enters and not self._passage.entered:
                raise self._make_layers_not_run_error("before its own, where its hidden states enter it", "previous")
            if self._leaves and self._passage.left is None:
                raise self._make_layers_not_run_error("after its own, where its hidden states leave it", "next")
            return output_tensor(output) if self._passage.left is None else self._passage.left
        finally:
            self._passage.received, self._passage.entered, self._passage.left = None, False, None

    def _make_layers_not_run_error(self, where: str, neighbor: str) -> SetupError:
        return SetupError(
            f"stage {self.stage_index} of {self.num_stages} ran no layer {where}; expected a forward that runs the"
            f" layers of the {neighbor} stage. Move the split points"
        )

    def extra_repr(self) -> str:
        return f"stage {self.stage_index} of {self.num_stages}"


def make_stage_module(
    model: nn.Module, config: PPModuleConfig, fqns_of_stage: Sequence[str], stage_index: int, num_stages: int
) -> StageModule:
    """Make a model into the stage that holds the given modules."""
    replace_modules_of_other_stages(model, config, fqns_of_stage)
    return StageModule(model, stage_index, num_stages, packs=True)


def replace_modules_of_other_stages(model: nn.Module, config: PPModuleConfig, fqns_of_stage: Sequence[str]) -> None:
    """Replace, in place, every input, layer and output module that is not the stage's by a :class:`PassThroughModule`.

    List indices, dictionary keys and state-dict keys of the stage's modules do not change.
    """
    for name, slot in build_stand_ins(model, config, fqns_of_stage).items():
        model.set_submodule(name, slot)


def check_no_ops_outside_modules(model: nn.Module, config: PPModuleConfig, hidden: Hidden, **kwargs: Any) -> None:
    """Run the model with every listed module passing its input through, and check that hidden states do not change.

    Operations of a forward outside its listed modules (a scale of the embedding) would be repeated on every stage. This
    run detects them, on a copy without the model's parameters. Hugging Face causal LMs do not need it
    (``derived_config.refine_module_config_by_trial_run``).
    """
    shell, failure = copy_model_sharing_tensors(model).train(), None
    replace_modules_of_other_stages(shell, config, ())
    # Tensors of the shell, such as rotary frequencies, may have no memory yet.
    replace_module_tensors(shell, sentinel_like)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            result = shell(hidden, **kwargs)
        sent, returned = (value if isinstance(value, tuple) else (value,) for value in (hidden, result))
        if len(sent) == len(returned) and all(map(_same, sent, returned)):
            return
    except Exception as error:
        failure = error
    reason = "changes its input" if failure is None else f"fails with {type(failure).__name__}: {failure}"
    ends = [", ".join(config.input_fqns + config.output_fqns)] if config.input_fqns + config.output_fqns else []
    raise SetupError(
        f"{type(model).__name__} cannot be cut: with {' and '.join([*ends, 'its layers'])}"
        f" passing through, its forward {reason}; expected a forward that then returns the hidden states unchanged."
        " Move its other operations on them, such as a sum of two embeddings or a dropout, into one of those modules."
        " If layers take and return several tensors, set layer_outputs in the config to their number"
    ) from failure


def _same(sent: torch.Tensor, returned: Any) -> bool:
    return isinstance(returned, torch.Tensor) and returned.shape == sent.shape and torch.equal(returned, sent)


def copy_model_sharing_tensors(model: nn.Module) -> nn.Module:
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


def get_hf_base_model(model: nn.Module) -> nn.Module:
    """Base model of a Hugging Face model, without its head."""
    base = getattr(model, str(model.base_model_prefix), None) or getattr(model, "model", model)
    assert isinstance(base, nn.Module)
    return base


def takes_cache(model: nn.Module) -> bool:
    """Return True if the forward of a Hugging Face model takes ``use_cache``."""
    parameters = inspect.signature(model.forward).parameters
    return "use_cache" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def output_tensor(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def replace_module_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a model's parameters, buffers and plain attributes, in place, unless *make* returns the same tensor."""
    replacements: dict[int, torch.Tensor] = {}
    for module in model.modules():
        namespaces: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for values in namespaces:
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    if id(value) not in replacements:
                        replacement = make(value)
                        replacements[id(value)] = (
                            value if replacement is value else copy_tensor_attributes(value, replacement)
                        )
                    values[name] = replacements[id(value)]


def copy_tensor_attributes(tensor: torch.Tensor, bare: torch.Tensor) -> torch.Tensor:
    """Return `bare` with the type (parameter or not), `requires_grad` and attributes of `tensor`."""
    if isinstance(tensor, nn.Parameter):
        result: torch.Tensor = nn.Parameter(bare, requires_grad=tensor.requires_grad)
    else:
        result = bare.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    excluded = {*vars(tensor.detach()), "_is_param"} if isinstance(tensor, FakeTensor) else ()
    for key, value in vars(tensor).items():
        if key not in excluded:
            setattr(result, key, value)
    return result


def sentinel_like(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor on the CPU with values that change what they are added to or multiplied by."""
    return torch.full(tensor.shape, 1.5, device="cpu").to(tensor.dtype)


def named_parameters_and_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, under all their names, in the order of the model."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
