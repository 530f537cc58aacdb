"""Base class of LightningModules that train in pipeline stages, and also without a pipeline."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_pipe.engine import InputError
from lightning_pipe.llm.batches.microbatches import MicroBatches, count_tokens, split_batch
from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.losses.router_losses import RouterLosses, sum_router_losses
from lightning_pipe.llm.model.derived_config import derive_config
from lightning_pipe.llm.model.hf_experts import has_routers
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.routing_replay import ROUTED_EXPERTS, take_routing, watch_routers
from lightning_pipe.llm.parallel.hf_documents import HFDocuments

__all__ = ["BatchResult", "PipelineModule", "RouterMeans", "labels_of"]


@dataclass(frozen=True)
class RouterMeans:
    """Router losses of a mixture of experts, as means over routers and tokens.

    Attributes:
        balance: mean load-balancing loss; 1 if all experts have the same load.
        z: mean z-loss.
    """

    balance: float
    z: float

    @classmethod
    def of(cls, sums: Tensor) -> RouterMeans | None:
        """Convert the result of ``sum_router_losses`` to means; None if the model has no router."""
        balance, z, tokens = sums.tolist()
        return cls(balance / tokens, z / tokens) if tokens else None


@dataclass(frozen=True)
class BatchResult:
    """Result of a batch, equal on every rank.

    Attributes:
        loss: scalar; mean over the loss tokens of the batch on all data-parallel ranks together.
        tokens: number of these tokens.
        routers: router losses if the model has a mixture of experts, else None.
    """

    loss: Tensor
    tokens: int
    routers: RouterMeans | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"A BatchResult has the attributes loss, tokens and routers, got {name!r}. Use the loss tensor of"
            " run_batch()'s result: result.loss."
        )


class PipelineModule(pl.LightningModule):
    """Base class of modules whose ``model`` can be cut into pipeline stages.

    A subclass defines :meth:`build_model` and ``configure_optimizers``. The other hooks take one micro-batch. Their
    defaults interpret ``input_ids``, ``labels`` and attention metadata, and subclasses can override them.

    Under Lightning's built-in strategies the whole batch is one micro-batch, unless the loader returns a list of
    micro-batches.
    """

    ignore_index = -100
    max_sequence_length: int | None = None
    """Longest sequence of the model in tokens, unless a strategy sets another limit; None for no limit."""
    vocabulary_size: int | None = None
    """Number of token ids. In stages, a batch with another id in ``input_ids`` is refused on every rank. None for the
    size of a Hugging Face model's embedding, or no check of other models."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        # Set by a strategy that runs the model in stages.
        self._run_in_stages: Callable[[Any], BatchResult] | None = None
        self._predict_in_stages: Callable[[Any], Any] | None = None
        self._watches_routers = False

    # ------------------------------------------------------------------ hooks for subclasses

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the unsplit model with initialized parameters."""

    def pipeline_config(self) -> ModuleConfig | None:
        """Return the names of the model's layers, or None to derive them from its structure.

        Names can be derived for Hugging Face's causal LMs, for ``nn.Sequential``, and for models with
        ``get_pp_module_config()``. The default returns the result of the module's ``get_pp_module_config()``, if it
        defines that method.
        """
        said = getattr(self, "get_pp_module_config", None)
        return None if said is None else ModuleConfig.from_mapping(said())

    def model_inputs(self, micro_batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's positional arguments, for the first stage, and keyword arguments, for every stage.

        The default passes ``input_ids`` as the only argument, and all other entries except ``labels`` as keywords.

        Args:
            micro_batch: rows of the batch for one micro-batch, on the device; token tensors are (rows, tokens).

        Raises:
            InputError: If the micro-batch has no ``input_ids``.
        """
        if "input_ids" not in micro_batch:
            raise InputError(
                "The model needs 'input_ids', but the batch has only the keys"
                f" {', '.join(map(repr, micro_batch))}. Add 'input_ids' to the batch, or override model_inputs."
            )
        keywords = {key: value for key, value in micro_batch.items() if key not in ("input_ids", "labels")}
        return (micro_batch["input_ids"],), keywords

    def summed_loss(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
        """Return the loss summed over the tokens of a micro-batch, a scalar.

        The default is the cross-entropy of logits and ``labels``.

        Args:
            output: output of the last stage; logits are (rows, tokens, vocabulary).
            micro_batch: the micro-batch that the output belongs to; ``labels`` are (rows, tokens).
        """
        return summed_cross_entropy(output, labels_of(micro_batch), self.ignore_index)

    def loss_tokens(self, micro_batch: Mapping[str, Any]) -> int:
        """Return the number of tokens of a micro-batch that :meth:`summed_loss` sums over.

        The default counts the ``labels`` that are not ``ignore_index``. It is 0 without labels, which prediction may
        omit.
        """
        labels = micro_batch.get("labels")
        return 0 if labels is None else count_tokens(labels, self.ignore_index)

    def router_tokens(self, micro_batch: Mapping[str, Any]) -> Tensor | None:
        """Return a bool mask (rows, tokens) of a micro-batch's tokens over which routers are balanced; None for all.

        The default selects the tokens whose label is not ``ignore_index``.
        """
        labels = micro_batch.get("labels")
        return None if labels is None else labels != self.ignore_index

    def example_micro_batch(self) -> Mapping[str, Any] | None:
        """Return a micro-batch like those of training, with at least two rows and two tokens, made without data.

        Strategies use it to trace the model or to measure its layers if their options require this. The default
        returns None, which disables both.
        """
        return None

    def pretrained_weights(self) -> PretrainedWeights | None:
        """Return weights that a strategy loads into a model built without memory; None to load no weights.

        Each rank loads only its own stages. For a model that has memory, ``build_model`` calls
        :func:`~lightning_pipe.llm.model.hf_weights.load_into`.
        """
        return None

    def prediction(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
        """Return the prediction of ``predict_step`` for a micro-batch, with its rows in dimension 0.

        The default returns the model's output.

        Args:
            output: output of the last stage, as in :meth:`summed_loss`.
            micro_batch: the micro-batch that the output belongs to.
        """
        return output

    # ------------------------------------------------------------------ steps

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build_model()

    def run_batch(self, batch: Any) -> BatchResult:
        """Compute the loss of a batch, in stages if the strategy splits the model.

        In stages, this call also runs backward if gradients are enabled.

        Args:
            batch: batch as the loader returns it: a mapping, or a list with one mapping per micro-batch.

        Returns:
            Result with the loss as an attribute: log ``result.loss``, and return it from ``training_step``.
        """
        if self._run_in_stages is not None:
            return self._run_in_stages(batch)
        parts = self._as_one(batch)
        losses, routers = [], []
        for part in parts.items:
            of_routers = RouterLosses(self.loss_tokens(part), counted=self.router_tokens(part))
            with of_routers:
                output = self._output(part)
            losses.append(of_routers.follow(self.summed_loss(output, part)))
            routers.append(of_routers)
        tokens = sum(one.tokens for one in routers)
        means = RouterMeans.of(sum_router_losses(routers))
        return BatchResult(torch.stack(losses).sum() / max(tokens, 1), tokens, means)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        result = self.run_batch(batch)
        size = max(result.tokens, 1)
        self.log("train_loss", result.loss, batch_size=size, prog_bar=True)
        if result.routers is not None:
            self.log("train_router_balance", result.routers.balance, batch_size=size)
            self.log("train_router_z", result.routers.z, batch_size=size)
        return result.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        result = self.run_batch(batch)
        self.log("val_loss", result.loss, batch_size=max(result.tokens, 1), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        result = self.run_batch(batch)
        self.log("test_loss", result.loss, batch_size=max(result.tokens, 1))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if self._predict_in_stages is not None:
            return self._predict_in_stages(batch)
        parts = self._as_one(batch)
        results = [self.prediction(self._output(part), part) for part in parts.items]
        return results if isinstance(batch, (list, tuple)) else parts.trim(results)

    def _as_one(self, batch: Any) -> MicroBatches:
        count = len(batch) if isinstance(batch, (list, tuple)) else 1
        return split_batch(batch, count, ignore_index=self.ignore_index)

    def _output(self, micro_batch: Mapping[str, Any]) -> Tensor:
        assert self.model is not None
        micro_batch, contexts = take_routing(micro_batch)
        if contexts and not has_routers(self.model):
            raise InputError(
                f"The batch has {ROUTED_EXPERTS!r}, but the model has no mixture of experts. Leave it out."
            )
        if contexts and not self._watches_routers:
            watch_routers(self.model, (self.pipeline_config() or derive_config(self.model)).layers)
            self._watches_routers = True
        arguments, keywords = self._inputs_of_whole(micro_batch)
        with ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context())
            return self._call(arguments, keywords)

    def _call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        """Call the unsplit model."""
        assert self.model is not None
        output: Tensor = self.model(*arguments, **keywords)
        return output

    def _inputs_of_whole(self, micro_batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of the unsplit model."""
        assert self.model is not None
        arguments, keywords = self.model_inputs(micro_batch)
        documents = HFDocuments.of(self.model)
        if documents is not None:
            documents.check(micro_batch)
            keywords = documents.keywords(micro_batch, keywords)
        return arguments, keywords


def labels_of(micro_batch: Mapping[str, Any]) -> Tensor:
    """Return the labels of a micro-batch.

    Raises:
        InputError: If it has no labels.
    """
    if "labels" not in micro_batch:
        raise InputError(
            f"The loss needs 'labels', but the batch has only the keys {', '.join(map(repr, micro_batch))}. Add labels"
            " with the next token for each token, or -100 (see shift_labels), or override summed_loss and loss_tokens."
        )
    labels: Tensor = micro_batch["labels"]
    return labels
