"""A LightningModule that says what a pipeline needs to know, and trains without one too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_pipe.engine import InputError
from lightning_pipe.llm.batches.microbatches import MicroBatches, count_tokens, split_batch
from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.losses.router_losses import RouterLosses, sum_router_losses
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.parallel.hf_documents import HFDocuments

__all__ = ["BatchResult", "PipelineModule", "RouterMeans", "labels_of"]


@dataclass(frozen=True)
class RouterMeans:
    """What the losses of a mixture of experts' routers came to: means over routers and tokens.

    Attributes:
        balance: of load-balancing losses; 1 where all experts have as much to do.
        z: of z-losses.
    """

    balance: float
    z: float

    @classmethod
    def of(cls, sums: Tensor) -> RouterMeans | None:
        """From what ``sum_router_losses`` gives; None where there was no router."""
        balance, z, tokens = sums.tolist()
        return cls(balance / tokens, z / tokens) if tokens else None


@dataclass(frozen=True)
class BatchResult:
    """What a batch came to, the same on every rank.

    Attributes:
        loss: mean over the loss tokens of the batch, of all data-parallel ranks together; a scalar.
        tokens: their number.
        routers: losses of routers, where the model has a mixture of experts.
    """

    loss: Tensor
    tokens: int
    routers: RouterMeans | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a BatchResult has loss, tokens and routers, and no {name!r}; run_batch() returns one, whose loss is the"
            " tensor: result.loss"
        )


class PipelineModule(pl.LightningModule):
    """Base class of modules whose ``model`` can be cut into pipeline stages.

    A subclass says how the model is built and what its optimiser is. What a batch of ``input_ids`` and ``labels`` (and
    metadata of attention) means is said here, and may be overridden: all hooks take one micro-batch.

    Under Lightning's own strategies the whole batch is one micro-batch, unless the loader gives a list of them.
    """

    ignore_index = -100
    max_sequence_length: int | None = None
    """The longest sequence that the model takes, in tokens, where a strategy is not told another; None for any."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        # Set by a strategy that runs the model in stages.
        self._run_in_stages: Callable[[Any], BatchResult] | None = None
        self._predict_in_stages: Callable[[Any], Any] | None = None

    # ------------------------------------------------------------------ what a subclass says

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Make the unsplit model, its parameters initialised."""

    def pipeline_config(self) -> ModuleConfig | None:
        """What the model is made of; None to find it out (Hugging Face's causal LMs, ``nn.Sequential``).

        Here: from the module's ``get_pp_module_config()``, if it has one; a model may have one too.
        """
        said = getattr(self, "get_pp_module_config", None)
        return None if said is None else ModuleConfig.from_mapping(said())

    def model_inputs(self, micro_batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model takes: arguments, for the first stage; keywords, for every stage.

        Here: ``input_ids``, and everything else but ``labels``.

        Raises:
            InputError: there are no ``input_ids``.
        """
        if "input_ids" not in micro_batch:
            raise InputError(
                f"the batch has {', '.join(map(repr, micro_batch))}; the model needs 'input_ids': give the batch that"
                " key, or override model_inputs"
            )
        keywords = {key: value for key, value in micro_batch.items() if key not in ("input_ids", "labels")}
        return (micro_batch["input_ids"],), keywords

    def summed_loss(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
        """The loss summed over the micro-batch's tokens: a scalar. Here: cross-entropy of logits and ``labels``."""
        return summed_cross_entropy(output, labels_of(micro_batch), self.ignore_index)

    def loss_tokens(self, micro_batch: Mapping[str, Any]) -> int:
        """How many tokens the loss sums over: none without labels, as there may be for prediction."""
        labels = micro_batch.get("labels")
        return 0 if labels is None else count_tokens(labels, self.ignore_index)

    def router_tokens(self, micro_batch: Mapping[str, Any]) -> Tensor | None:
        """Which tokens routers are to be balanced over, a bool each; None for all. Here: those whose label counts."""
        labels = micro_batch.get("labels")
        return None if labels is None else labels != self.ignore_index

    def example_micro_batch(self) -> Mapping[str, Any] | None:
        """A micro-batch like those of training, with two rows and two tokens at least, made without data.

        With it a strategy traces the model, or measures its layers, where it is asked to. None for neither.
        """
        return None

    def pretrained_weights(self) -> PretrainedWeights | None:
        """What a strategy fills a model with that was built without memory, each rank its own part; None for nothing.

        ``build_model`` calls :func:`~lightning_pipe.llm.model.hf_weights.load_into`, for a model that has memory.
        """
        return None

    def prediction(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
        """What ``predict_step`` gives for a micro-batch, with its rows in dimension 0. Here: the model's output."""
        return output

    # ------------------------------------------------------------------ what comes of it

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build_model()

    def run_batch(self, batch: Any) -> BatchResult:
        """Loss of a batch; in stages, where the strategy does that, with backward if gradients are enabled.

        Args:
            batch: as the loader gives it: a mapping, or a list of them, one for each micro-batch.

        Returns:
            Not the loss, but what has it: log ``result.loss``, and return it from ``training_step``.
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
        arguments, keywords = self._inputs_of_whole(micro_batch)
        output: Tensor = self.model(*arguments, **keywords)
        return output

    def _inputs_of_whole(self, micro_batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's inputs where it is not cut."""
        assert self.model is not None
        arguments, keywords = self.model_inputs(micro_batch)
        documents = HFDocuments.of(self.model)
        if documents is not None:
            documents.check(micro_batch)
            keywords = documents.keywords(micro_batch, keywords)
        return arguments, keywords


def labels_of(micro_batch: Mapping[str, Any]) -> Tensor:
    """The labels of a micro-batch.

    Raises:
        InputError: it has none.
    """
    if "labels" not in micro_batch:
        raise InputError(
            f"the batch has {', '.join(map(repr, micro_batch))}; the loss needs 'labels' as well: for each token the"
            " one that follows, or -100 (shift_labels makes them of input_ids). Or override summed_loss and loss_tokens"
        )
    labels: Tensor = micro_batch["labels"]
    return labels
