"""Hooks by which a module describes its model and its micro-batches to a run in pipeline stages."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_pipe.engine import InputError
from lightning_pipe.llm.batches.microbatches import count_loss_tokens
from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from lightning_pipe.llm.model.module_config import PPModuleConfig


@dataclass(frozen=True)
class RouterLossMeans:
    """Router losses of a mixture of experts, as means over routers and tokens.

    Attributes:
        balance: mean load-balancing loss; 1 if all experts have the same load.
        z: mean z-loss.
    """

    balance: float
    z: float

    @classmethod
    def from_sums(cls, sums: Tensor) -> RouterLossMeans | None:
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
    routers: RouterLossMeans | None = None


class StageHooks:
    """Hooks of a model that is trained in pipeline stages.

    A subclass defines :meth:`build_model`. The other hooks take one micro-batch. Their defaults interpret
    ``input_ids``, ``labels`` and attention metadata, and subclasses can override them.

    Attributes:
        model: the model, or the part of it that this rank holds; None before it is built.
    """

    model: nn.Module | None
    ignore_index = -100
    max_sequence_length: int | None = None
    """Longest sequence of the model in tokens, unless a strategy sets another limit; None for no limit."""
    vocabulary_size: int | None = None
    """Number of token ids. In stages, a batch with another id in ``input_ids`` is refused on every rank. None for the
    size of a Hugging Face model's embedding, or no check of other models."""

    @abstractmethod
    def build_model(self) -> nn.Module | Sequence[Any]:
        """Build the unsplit model with initialized parameters, or a list of stages (see ``HandBuiltStages``)."""

    def pipeline_module_config(self) -> PPModuleConfig | None:
        """Return the names of the model's layers, or None to derive them from its structure.

        Names can be derived for Hugging Face's causal LMs, for ``nn.Sequential``, and for models with
        ``get_pp_module_config()``. The default returns the result of the module's ``get_pp_module_config()``, if it
        defines that method.
        """
        get_config = getattr(self, "get_pp_module_config", None)
        return None if get_config is None else PPModuleConfig.from_mapping(get_config())

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

        Args:
            micro_batch: as in :meth:`model_inputs`. In stages its tensors are on the CPU, so that the host does not
                wait for the device.
        """
        labels = micro_batch.get("labels")
        return 0 if labels is None else count_loss_tokens(labels, self.ignore_index)

    def router_token_mask(self, micro_batch: Mapping[str, Any]) -> Tensor | None:
        """Return a bool mask (rows, tokens) of a micro-batch's tokens over which routers are balanced; None for all.

        The default selects the tokens whose label is not ``ignore_index``.
        """
        labels = micro_batch.get("labels")
        return None if labels is None else labels != self.ignore_index

    def example_micro_batch(self) -> Mapping[str, Any] | None:
        """Return a micro-batch like those of training, with at least two rows and two tokens, made without data.

        Strategies measure the layers of the model with it if their options require this. The default returns None,
        which disables that.
        """
        return None

    def pretrained_weights(self) -> PretrainedWeights | None:
        """Return weights that a strategy loads into the model; None to load no weights.

        Each rank loads only its own stages. For a run without stages, ``build_model`` calls
        :func:`~lightning_pipe.llm.model.hf_weights.load_pretrained_weights`, which does nothing in stages.
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


def labels_of(micro_batch: Mapping[str, Any]) -> Tensor:
    """Return the labels of a micro-batch."""
    if "labels" not in micro_batch:
        raise InputError(
            f"The loss needs 'labels', but the batch has only the keys {', '.join(map(repr, micro_batch))}. Add labels"
            " with the next token for each token, or -100 (see shift_labels), or override summed_loss and loss_tokens."
        )
    labels: Tensor = micro_batch["labels"]
    return labels


def warn_about_unshifted_labels(hooks: StageHooks, micro_batches: Sequence[Mapping[str, Any]], tokens: int) -> None:
    """Warn if the labels repeat the input, as for models of transformers, which shift them."""
    # A module with another count may shift labels itself.
    if type(hooks).loss_tokens is not StageHooks.loss_tokens or tokens < 16:
        return
    for item in micro_batches:
        ids, labels = item.get("input_ids"), item.get("labels")
        if not (isinstance(ids, Tensor) and isinstance(labels, Tensor) and ids.shape == labels.shape):
            return
        if not ((labels == ids) | (labels == hooks.ignore_index)).all():
            return
    warnings.warn(
        "labels equal input_ids, so the model learns to repeat its input; expected the next token as the label of"
        " each token, or -100. Shift the labels in the batch: lightning_pipe.llm.losses.cross_entropy.shift_labels",
        stacklevel=2,
    )
