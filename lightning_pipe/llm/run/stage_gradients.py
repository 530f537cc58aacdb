"""Completes the gradients of a model in stages: sums partial and copied ones, and counts each once in the norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects
from lightning_pipe.llm.model.tied import TiedGradients, TiedParameter
from lightning_pipe.llm.parallel.gradients import GradientNorm, clip_grads_with_norm
from lightning_pipe.llm.parallel.parallel_dims import ParallelMeshes
from lightning_pipe.llm.parallel.tensor_parallel import TensorParallelGradients
from lightning_pipe.llm.split.stage_split import SplitModel


class StageGradients:
    """Gradient work between the last backward of a step and its optimizers; all ranks make the same calls."""

    def __init__(self, split: SplitModel, meshes: ParallelMeshes, rank_of_stage: Mapping[int, int]) -> None:
        self._split = split
        self._pipeline = meshes.root["pipeline"]
        self._rank_of_stage = rank_of_stage
        for tied in split.tied:
            if len(self._holders(tied)) < len(tied.stages) and meshes.data is not None:
                raise SetupError(
                    f"stages {' and '.join(map(str, tied.stages))} hold {' and '.join(tied.names)}, one tied parameter,"
                    " and are on one rank, where data parallelism would make two parameters of it. Use a schedule that"
                    " places stages in a loop (interleaved_zero_bubble), data-parallel sizes of 1, or untie the two"
                )
        copies = [tied for tied in split.tied if len(self._holders(tied)) > 1]
        parameters = dict(split.local_model.named_parameters())
        pipelines = meshes.root.mesh.flatten(1).T.tolist()
        self._tied = TiedGradients(copies, parameters, [self._holders(tied) for tied in copies], pipelines)
        self._tensors = None if meshes.tensor is None else TensorParallelGradients(split.local_model, meshes.tensor)
        self._norm: GradientNorm | None = None

    def check_tied_param_groups(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that all copies of a parameter are trained alike. Every rank calls it once it has its optimizers."""
        parameters = dict(self._split.local_model.named_parameters())
        descriptions = {}
        for tied in self._split.tied:
            copy = parameters.get(tied.names[0])
            if copy is not None and self._pipeline.get_local_rank() in self._holders(tied):
                places = [
                    f"group {place} of optimizer {number}"
                    + "".join(f", {key}={value!r}" for key, value in sorted(group.items()) if key != "params")
                    for number, optimizer in enumerate(optimizers)
                    for place, group in enumerate(optimizer.param_groups)
                    if any(parameter is copy for parameter in group["params"])
                ]
                descriptions[tied.names[0]] = (
                    f"{'trained' if copy.requires_grad else 'frozen'}, in {places or 'no group'}"
                )
        by_name: dict[str, set[str]] = {}
        for rank_descriptions in all_gather_objects(descriptions, dist.group.WORLD):
            for name, description in rank_descriptions.items():
                by_name.setdefault(name, set()).add(description)
        for name, variants in by_name.items():
            if len(variants) > 1:
                raise SetupError(
                    f"{name} is one parameter of which two ranks hold copies, and configure_optimizers treats them in"
                    f" different ways: {' - and - '.join(sorted(variants))}. Select parameters by their names in"
                    " named_parameters(), which are the same for all copies, and not by the class of the module"
                )

    def finalize_grads(self) -> None:
        """Complete the gradients; called once per step, after all its batches and before gradients are scaled."""
        if self._tensors is not None:
            self._tensors.all_reduce()
        self._tied.sum()

    def clip_grad_norm(self, optimizer: Optimizer | None, clip_val: int | float) -> Tensor:
        """Clip by the norm over all stages, and return it; instead of a precision plugin's ``clip_grad_by_norm``."""
        parameters: dict[str, nn.Parameter] = dict(self._split.local_model.named_parameters())
        if self._norm is None:
            # Only the first copy of a tied parameter counts in the norm.
            rank = self._pipeline.get_local_rank()
            copies = {tied.names[0] for tied in self._split.tied if self._holders(tied)[0] != rank}
            counted = {name: value for name, value in parameters.items() if name not in copies}
            self._norm = GradientNorm(self._split.names, counted, self._pipeline.get_group())
        norm = self._norm()
        clip_grads_with_norm(parameters.values(), clip_val, norm)
        return norm

    def _holders(self, tied: TiedParameter) -> list[int]:
        """Pipeline ranks that hold a copy."""
        return sorted({self._rank_of_stage[stage] for stage in tied.stages})
