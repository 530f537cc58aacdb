"""Base class of LightningModules that train in pipeline stages, and also without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_pipe.llm.batches.microbatches import MicroBatches, split_batch
from lightning_pipe.llm.batches.padding import BOUNDARIES, PadValues, extend_last_document
from lightning_pipe.llm.losses.router_losses import RouterLosses, sum_router_losses
from lightning_pipe.llm.model.built_stages import HandBuiltStages
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.hf_experts import has_routers
from lightning_pipe.llm.model.routing_replay import (
    ROUTED_EXPERTS,
    MoEBlockInfo,
    check_replays_not_shared,
    check_routed_experts,
    install_moe_block_tracking,
    pop_routed_experts_from_batch,
)
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.parallel.hf_document_masking import HFDocumentMasking
from lightning_pipe.llm.run.stage_hooks import BatchResult, RouterLossMeans, StageHooks, warn_about_unshifted_labels


class PipelineModule(StageHooks, pl.LightningModule):
    """Base class of modules whose ``model`` can be cut into pipeline stages.

    A subclass defines ``build_model`` and ``configure_optimizers``. The other hooks are those of
    :class:`~lightning_pipe.llm.run.stage_hooks.StageHooks`.

    Under Lightning's built-in strategies the whole batch is one micro-batch, unless the loader returns a list of
    micro-batches, or rows with document boundaries (``cu_seq_lens``), each of which is then a micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        # Set by a strategy that runs the model in stages.
        self._run_in_stages: Callable[[Any], BatchResult] | None = None
        self._predict_in_stages: Callable[[Any], Any] | None = None
        self._mixtures: list[MoEBlockInfo] | None = None

    # ------------------------------------------------------------------ steps

    def configure_model(self) -> None:
        self.model = HandBuiltStages.as_model(self.build_model() if self.model is None else self.model)

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
        parts = self._convert_to_microbatches(batch)
        losses, routers = [], []
        for part in parts.items:
            of_routers = RouterLosses(self.loss_tokens(part), token_mask=self.router_token_mask(part))
            with of_routers:
                loss = self._compute_unsplit_output(part, self._make_loss_function(part))
            losses.append(of_routers.scale_with_loss(loss))
            routers.append(of_routers)
        tokens = sum(part_losses.tokens for part_losses in routers)
        if not self.global_rank:
            warn_about_unshifted_labels(self, parts.items, tokens)
        means = RouterLossMeans.from_sums(sum_router_losses(routers))
        return BatchResult(torch.stack(losses).sum() / max(tokens, 1), tokens, means)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        result = self.run_batch(batch)
        self.log("train_loss", result.loss, batch_size=result.tokens, prog_bar=True)
        if result.routers is not None:
            self.log("train_router_balance", result.routers.balance, batch_size=result.tokens)
            self.log("train_router_z", result.routers.z, batch_size=result.tokens)
        return result.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        result = self.run_batch(batch)
        self._log_mean("val_loss", result, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        result = self.run_batch(batch)
        self._log_mean("test_loss", result)

    def _log_mean(self, name: str, result: BatchResult, prog_bar: bool = False) -> None:
        """Log a loss, whose mean over the epoch is that of all ranks. In stages, they have the same losses."""
        if self._run_in_stages is not None:
            self.log(name, result.loss, batch_size=result.tokens, prog_bar=prog_bar)
        else:
            # Lightning divides the sum of the ranks' weights by their number, and rounds down.
            weight = result.tokens * self.trainer.world_size
            self.log(name, result.loss, batch_size=weight, prog_bar=prog_bar, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if self._predict_in_stages is not None:
            return self._predict_in_stages(batch)
        parts = self._convert_to_microbatches(batch)
        results = [self.prediction(self._compute_unsplit_output(part), part) for part in parts.items]
        return results if isinstance(batch, (list, tuple)) else parts.merge_outputs(results)

    def _convert_to_microbatches(self, batch: Any) -> MicroBatches:
        count, padding = 1, PadValues(labels=self.ignore_index)
        if isinstance(batch, (list, tuple)):
            count = len(batch)
        elif isinstance(batch, Mapping) and any(batch.get(key) is not None for key in BOUNDARIES):
            count = max(1, padding.get_microbatch_rows_and_length(batch)[0])  # boundaries are those of one row
        parts = split_batch(batch, count, padding)
        check_replays_not_shared(parts.items)
        for part in parts.items:
            rows, length = padding.get_microbatch_rows_and_length(part)
            extend_last_document(part, length, rows)
        return parts

    def _make_loss_function(self, micro_batch: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
        return lambda output: self.summed_loss(output, micro_batch)

    def _compute_unsplit_output(
        self, micro_batch: Mapping[str, Any], result_of: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        assert self.model is not None
        if micro_batch.get(ROUTED_EXPERTS) is not None:
            if self._mixtures is None:
                is_moe = has_routers(self.model)
                layers = (
                    (self.pipeline_module_config() or derive_pp_module_config(self.model)).layer_fqns if is_moe else ()
                )
                self._mixtures = install_moe_block_tracking(self.model, layers)
            check_routed_experts(micro_batch, self._mixtures, PadValues().get_microbatch_rows_and_length(micro_batch))
        micro_batch, contexts = pop_routed_experts_from_batch(micro_batch)
        arguments, keywords = self._get_inputs_of_unsplit_model(micro_batch)
        output: Tensor = StageModule(self.model, 0, 1)(*arguments, result_of=result_of, contexts=contexts, **keywords)
        return output

    def _get_inputs_of_unsplit_model(self, micro_batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of the unsplit model."""
        assert self.model is not None
        arguments, keywords = self.model_inputs(micro_batch)
        documents = HFDocumentMasking.from_model(self.model)
        if documents is not None:
            documents.check(micro_batch)
            keywords = documents.add_document_inputs(micro_batch, keywords)
        return arguments, keywords
