"""Adam over the rows of a batch, for kernels that FBGEMM lacks on CPU.

It matches FBGEMM's Adam on a GPU: moments of a row only change when it is looked up, and the bias correction uses the
number of batches that the kernel has trained (Kingma and Ba, "Adam", 2015).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_pipe.recsys.kernels.fused_kernels import ROW_OPTIMIZER
from lightning_pipe.recsys.kernels.gradient_norm import row_gradients
from lightning_pipe.recsys.kernels.kernel_calls import KernelCall


class RowAdam:
    """Trains the tables of one kernel in place of its optimizer, of which only the learning rate is used.

    Attributes:
        states: the two moments of each table (rows x columns, initially zeros); empty under SGD.
        steps: number of trained batches.
    """

    def __init__(self, kernel: Any, hyper_parameters: Sequence[Mapping[str, Any] | None]) -> None:
        self._kernel = kernel
        self._hyper_parameters = list(hyper_parameters)
        self._weights = [weights.detach() for weights in kernel.split_embedding_weights()]
        self.states = [
            [] if table_hyper_parameters is None else [torch.zeros_like(weights, dtype=torch.float32) for _ in range(2)]
            for weights, table_hyper_parameters in zip(self._weights, self._hyper_parameters, strict=True)
        ]
        self.steps = 0
        setattr(kernel, ROW_OPTIMIZER, self)

    @torch.no_grad()
    def step(self, calls: Sequence[tuple[KernelCall, torch.Tensor]]) -> None:
        """Train the rows that one batch looked up."""
        self.steps += 1
        rate = self._kernel.get_learning_rate()
        # Hyper-parameters by feature; several features may share a table.
        starts = dict(zip(self._kernel.feature_table_map, self._kernel.hash_size_cumsum.tolist(), strict=False))
        for rows, gradients in row_gradients(calls):
            for table, weights in enumerate(self._weights):
                bounds = torch.tensor([starts[table], starts[table] + len(weights)], device=rows.device)
                table_rows = slice(*torch.searchsorted(rows, bounds).tolist())
                if table_rows.start < table_rows.stop:
                    self._step_table(table, weights, rows[table_rows] - starts[table], gradients[table_rows], rate)

    def _step_table(
        self, table: int, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, rate: float
    ) -> None:
        hyper_parameters, states = self._hyper_parameters[table], self.states[table]
        row_values = weights.index_select(0, rows)
        if hyper_parameters is None:
            weights.index_copy_(0, rows, (row_values.float() - rate * gradients).to(row_values.dtype))
            return
        first, second = (state.index_select(0, rows) for state in states)
        beta1, beta2 = hyper_parameters["betas"]
        first.lerp_(gradients, 1 - beta1)
        second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        states[0].index_copy_(0, rows, first)
        states[1].index_copy_(0, rows, second)
        first_bias, second_bias = 1 - beta1**self.steps, 1 - beta2**self.steps
        change = (first / first_bias).div_((second / second_bias).sqrt_().add_(hyper_parameters["eps"]))
        weights.index_copy_(0, rows, (row_values.float() - rate * change).to(row_values.dtype))


def get_attached_row_optimizer(kernel: Any) -> RowAdam | None:
    """Return the optimizer that trains a kernel's tables in place of its own, or None."""
    optimizer: RowAdam | None = getattr(kernel, ROW_OPTIMIZER, None)
    return optimizer
