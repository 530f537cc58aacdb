"""Config of a model, declared by the model itself or derived from its structure and a trial run.

A trial runs a Hugging Face causal LM without its modules, to find their order and the arguments of its layers. Other
modules replace them, so a run takes neither parameters nor memory. The model runs on token ids, as the whole model and
the first stage do, and on embeddings, as later stages do. Stages exchange only the hidden states between two layers, so
everything else that a layer receives must be equal in all runs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import tree_leaves
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.losses.balance_loss import BalanceLoss
from lightning_pipe.llm.model.built_stages import HandBuiltStages
from lightning_pipe.llm.model.module_config import NEEDED, PPModuleConfig, TrialRun, is_inside
from lightning_pipe.llm.model.shapes import find_failing_module
from lightning_pipe.llm.model.slots import PassThroughNonLayerModule, get_token_embedding_width, is_causal_lm
from lightning_pipe.llm.model.stage_module import (
    get_hf_base_model,
    output_tensor,
    replace_module_tensors,
    sentinel_like,
    takes_cache,
)

_ROWS, _LENGTH = 5, 3  # an unusual number of rows, so that a tensor is not unpacked like a tuple of results
_MOST_RESULTS = 4
_BY_HAND = "Cut it into stages by hand: return a list of modules from build_model"


def derive_pp_module_config(model: nn.Module) -> PPModuleConfig:
    """Config of a model, from its ``get_pp_module_config()`` or from a known structure.

    Known structures are a plain ``nn.Sequential`` and Hugging Face causal LMs (such as Llama, Qwen3 and GPT-NeoX).
    """
    if callable(declared := getattr(model, "get_pp_module_config", None)):
        config = PPModuleConfig.from_mapping(declared())
    elif isinstance(model, nn.Sequential) and type(model).forward in (nn.Sequential.forward, HandBuiltStages.forward):
        config = PPModuleConfig(len(model), "")
    elif is_causal_lm(model):
        config = _derive_causal_lm_pp_config(model)
    else:
        raise SetupError(
            f"{type(model).__name__} does not say what its stages are made of, and is neither an nn.Sequential nor a"
            f" Hugging Face causal LM. Expected: {NEEDED}"
        )
    config.check_against_model(model)
    return config


def refine_module_config_by_trial_run(model: nn.Module, config: PPModuleConfig) -> PPModuleConfig:
    """Config with modules where a trial run of a Hugging Face causal LM calls them; other models keep their config."""
    if not is_causal_lm(model) or config.trial is not None:
        return config
    outer_fqns = (*config.input_fqns, *config.output_fqns)
    if skipped := getattr(model.get_submodule(config.layer_prefix.rpartition(".")[0]), "layerdrop", 0.0):
        raise SetupError(
            f"{type(model).__name__} cannot be cut into stages: it skips layers at random, with a layerdrop of"
            f" {skipped}; expected all layers, since each stage would skip others. Set layerdrop (or decoder_layerdrop)"
            " to 0.0 in the config"
        )
    trial = _run_trial_without_layers(model, config.layer_fqns, outer_fqns)
    layers = [index for index, name in enumerate(trial.called) if name in config.layer_fqns]
    before, after = dict.fromkeys(trial.called[: layers[-1]]), dict.fromkeys(trial.called[layers[0] :])
    both = [name for name in before if name in after and name in outer_fqns]
    trained = [name for name in both if next(model.get_submodule(name).parameters(), None) is not None]
    if trained:
        raise SetupError(
            f"{type(model).__name__} cannot be cut into stages: its forward uses {', '.join(trained)} before and after"
            f" a layer of {config.layer_prefix}; expected modules that it uses only before or only after all layers"
        )
    # A module that token ids do not need, such as a vision tower, goes to the first stage.
    first = [*before, *(name for name in outer_fqns if name not in trial.called)]
    return replace(
        config,
        input_fqns=tuple(name for name in first if name in outer_fqns and name not in both),
        output_fqns=tuple(name for name in after if name in outer_fqns and name not in both),
        always_keep_fqns=(*config.always_keep_fqns, *both),
        trial=trial,
    )


def returns_head_results(model: nn.Module) -> bool:
    """Return True if a Hugging Face causal LM is known to return the results of its head unchanged, as its logits."""
    try:
        trial = refine_module_config_by_trial_run(model, derive_pp_module_config(model)).trial
    except SetupError:  # the model may still be trained on one device
        return False
    return trial is not None and trial.logits_plain


def _derive_causal_lm_pp_config(model: nn.Module) -> PPModuleConfig:
    """Config of a Hugging Face causal LM, from its structure and the order in which a trial run calls its modules."""
    names = {id(module): name for name, module in model.named_modules()}
    lists = {
        names[id(module)]: module for module in get_hf_base_model(model).modules() if isinstance(module, nn.ModuleList)
    }
    outermost = {name: layers for name, layers in lists.items() if not is_inside(name, lists.keys() - {name})}
    if not outermost:
        raise SetupError(f"{type(model).__name__} has no ModuleList of layers. Expected: {NEEDED}")
    tokens = names[id(model.get_input_embeddings())].split(".")  # type: ignore[operator]

    def score_layer_list(name: str) -> tuple[int, int]:
        """Nearness to the embedding of tokens, since vision towers have lists of layers too, and length."""
        pairs = zip(name.split("."), tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)), len(outermost[name])

    failures: list[SetupError] = []
    for name in sorted(outermost, key=score_layer_list, reverse=True):
        beside = dict(_modules_outside_layers(model, name))
        buffers = [key for key, module in beside.items() if [*module.buffers()] and not [*module.parameters()]]
        outer_fqns = tuple(key for key in beside if key not in buffers)
        config = PPModuleConfig(len(outermost[name]), name, outer_fqns, (), tuple(buffers))
        try:
            config.check_against_model(model)
            return refine_module_config_by_trial_run(model, config)
        except SetupError as error:
            failures.append(error)
    text = str(failures[0])
    raise SetupError(text if _BY_HAND in text else f"{text}. {_BY_HAND}")


def _modules_outside_layers(model: nn.Module, layer_prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that contain no layer and that no module without layers contains. Lists are replaced by their items."""
    pending = list(model.named_children())[::-1]
    while pending:
        name, module = pending.pop()
        if name == layer_prefix:
            continue
        if layer_prefix.startswith(f"{name}.") or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            pending += [(f"{name}.{child}", submodule) for child, submodule in module.named_children()][::-1]
        else:
            yield name, module


def _run_trial_without_layers(model: nn.Module, layers: Sequence[str], outer_fqns: Sequence[str]) -> TrialRun:
    """Run a causal LM without its layers and the other modules that only some stages hold, given by name."""
    failures: list[tuple[int, str]] = []  # how far each attempt got, and what was wrong then
    for results in range(_MOST_RESULTS + 1):
        with (
            torch.device("cpu"),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.compiler.set_stance("force_eager"),  # a mask of FlexAttention would be compiled for the CPU
        ):
            shell = _ModelWithReplacedLayers(model, layers, outer_fqns, results)
            try:
                runs = [
                    shell.run_model(tokens=tokens, with_head=with_head)
                    for tokens in (True, False)
                    for with_head in (True, False)
                ]
            except Exception as error:
                fails = f"{find_failing_module(error, shell.model) or 'it'} fails with {type(error).__name__}: {error}"
                failures.append((len(shell.calls), f"with its modules replaced, {fails}"))
                continue
        first, later = runs[0], runs[-1]
        problems = [next(_find_layer_split_problems(layers, first, run), None) for run in runs]
        if not any(problems) and first.names_after_last_layer != runs[2].names_after_last_layer:
            used = ", ".join(sorted(first.names_after_last_layer ^ runs[2].names_after_last_layer))
            problems = [f"after its layers its forward uses {used} or not, by token ids; the last stage has none"]
        if not any(problems):
            head = model.get_output_embeddings()  # type: ignore[operator]
            logits = [call.result for call in first.calls if model.get_submodule(call.name) is head]
            return TrialRun(
                tuple(call.name for call in first.calls),
                results,
                _are_equal_tensors(later.layer_calls[0].hidden, later.embeddings),
                _are_equal_tensors(later.output, later.layer_calls[-1].result),
                any(_are_equal_tensors(first.output, tensor) for tensor in logits),
            )
        failures.append((sum(len(run.calls) for run in runs), next(filter(None, problems))))
    raise SetupError(
        f"{type(model).__name__} cannot be cut into stages, which hold only some of its layers and of"
        f" {', '.join(outer_fqns)}: {max(failures, key=lambda failure: failure[0])[1]}. {_BY_HAND}"
    )


class _Call(NamedTuple):
    """Call of a replaced module. ``arguments`` are those of a layer besides its hidden states."""

    name: str
    hidden: Tensor
    result: Tensor
    arguments: Mapping[str, Any] | None


class _RecordedModelRun(NamedTuple):
    """A run's calls, the embeddings that it was given, and its output."""

    calls: Sequence[_Call]
    embeddings: Tensor
    output: Any

    @property
    def layer_calls(self) -> list[_Call]:
        return [call for call in self.calls if call.arguments is not None]

    @property
    def names_after_last_layer(self) -> set[str]:
        """Names of the modules that are called after the last layer."""
        return {call.name for call in takewhile(lambda call: call.arguments is None, reversed(self.calls))}


class _ModelWithReplacedLayers:
    """Copy of a model with other modules in place of its layers and of its modules between the layers and the root."""

    def __init__(self, model: nn.Module, layers: Sequence[str], outer_fqns: Sequence[str], results: int) -> None:
        self.calls: list[_Call] = []
        self._width, self._runs, memo = get_token_embedding_width(model), 0, dict[int, Any]()
        for name in (*outer_fqns, *layers):
            module = model.get_submodule(name)
            slot = memo[id(module)] = PassThroughNonLayerModule(module, self._width)
            arguments = tuple(inspect.signature(module.forward).parameters)
            note = partial(self._record_call, name, arguments, results if name in set(layers) else None)
            slot.register_forward_hook(note, with_kwargs=True)
        for module in model.modules():
            values = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
            memo |= {id(value): value for value in values if isinstance(value, Tensor)}
        self.model: Any = copy.deepcopy(model, memo).train()
        replace_module_tensors(self.model, sentinel_like)  # tensors may have no memory

    def run_model(self, *, tokens: bool, with_head: bool) -> _RecordedModelRun:
        """Run the model on token ids or on embeddings, with or without what follows its base model."""
        self._runs, self.calls = self._runs + 1, []
        base = get_hf_base_model(self.model)
        model: Any = self.model if with_head else base
        # The last token is padding: a mask that a model derives from it is not that of later stages.
        padding = getattr(self.model.config, "pad_token_id", None) or 0
        ids = torch.full((_ROWS, _LENGTH), padding + 1)
        ids[0, -1] = padding
        embeddings = self._make_distinct_hidden_states((_ROWS, _LENGTH, self._width), torch.float32)
        inputs: dict[str, Any] = {"use_cache": False} if takes_cache(model) else {}
        inputs |= {"input_ids": ids} if tokens else {"inputs_embeds": embeddings}
        with BalanceLoss.capture_router_logits(base):
            return _RecordedModelRun(self.calls, embeddings, output_tensor(model(**inputs)))

    def _record_call(
        self, name: str, names: Sequence[str], results: int | None, slot: Any, args: Any, kwargs: Any, hidden: Any
    ) -> Any:
        """Note a call, and return the result: new values, unless the module passes its input through."""
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        passes = results is None and any(hidden is value for value in arguments.values())
        result = hidden if passes else self._make_distinct_hidden_states(hidden.shape, hidden.dtype)
        arguments = {key: value for key, value in arguments.items() if value is not hidden}
        self.calls.append(_Call(name, hidden.clone(), result.clone(), None if results is None else arguments))
        # Further results of a layer are not numbers, so that they are seen where they arrive.
        return (result, *[result * torch.nan] * (results - 1)) if results else result

    def _make_distinct_hidden_states(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Values that differ between runs and calls."""
        values = torch.linspace(self._runs, self._runs + 1, torch.Size(shape).numel())
        return (values.view(shape) + len(self.calls)).to(dtype)


def _find_layer_split_problems(
    layers: Sequence[str], first: _RecordedModelRun, run: _RecordedModelRun
) -> Iterator[str]:
    """Reasons why stages cannot run the layers. A layer may be left out."""
    expected = "; expected only the hidden states, since stages exchange nothing else"
    called = [call.name for call in run.layer_calls]
    if not called or called != [name for name in layers if name in called]:
        yield f"on token ids its forward runs {', '.join(called) or 'no layer'}; expected {', '.join(layers)} in order"
        return
    shape = tuple(run.layer_calls[0].hidden.shape)
    if shape[:2] != (_ROWS, _LENGTH):
        yield f"layer {called[0]} receives {shape} for {_ROWS} rows of {_LENGTH} tokens; expected (rows, tokens, ...)"
    for previous, following in pairwise(run.layer_calls):
        if not _are_equal_tensors(following.hidden, previous.result):
            yield (
                f"its forward changes the hidden states between {previous.name} and {following.name};"
                " expected no change"
            )
    for first_call, run_call in zip(first.layer_calls, run.layer_calls, strict=False):
        for name in dict.fromkeys((*(first_call.arguments or ()), *(run_call.arguments or ()))):
            first_leaves, run_leaves = (
                [leaf for leaf in tree_leaves((call.arguments or {}).get(name)) if isinstance(leaf, Tensor)]
                for call in (first_call, run_call)
            )
            if any(leaf.is_floating_point() and leaf.isnan().any() for leaf in first_leaves):
                yield f"layer {first_call.name} receives a further result of an earlier layer as {name}{expected}"
            if len(first_leaves) != len(run_leaves) or not all(map(_are_equal_tensors, first_leaves, run_leaves)):
                yield f"layer {first_call.name} receives {name}, which later stages cannot compute{expected}"


def _are_equal_tensors(left: Any, right: Any) -> bool:
    both = isinstance(left, Tensor) and isinstance(right, Tensor)
    return both and left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
