"""TorchRec's metrics of click predictions, over all ranks, with states for checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.ne import NEMetric

_TASK = "click"


class ClickMetrics(nn.Module):
    """Normalized entropy and calibration of all rows since the last reset, and of a window of the latest rows.

    Args:
        batch_size: number of rows of a batch of one rank.
        rank: this rank, from the trainer.
        ranks: number of ranks.
        window: number of rows of the window on each rank, at least *batch_size* (default 100,000).
    """

    def __init__(self, batch_size: int, rank: int = 0, ranks: int = 1, window: int = 100_000) -> None:
        super().__init__()
        self.metrics = nn.ModuleList(
            [
                kind(
                    world_size=ranks,
                    my_rank=rank,
                    batch_size=batch_size,
                    tasks=[RecTaskInfo(name=_TASK)],
                    window_size=window * ranks,
                    compute_on_all_ranks=True,  # otherwise only rank 0 has the values
                )
                for kind in (NEMetric, CalibrationMetric)
            ]
        )
        self._computations = [module for module in self.metrics.modules() if isinstance(module, Metric)]
        for metric in self._computations:
            # A checkpoint has the state_dict of one rank, but the states differ between ranks.
            metric.persistent(False)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the rows of a batch.

        Args:
            logits: log-odds of a click, [B].
            labels: 0 or 1, [B].
        """
        predictions = {_TASK: torch.sigmoid(logits.detach().double())}
        for metric in self.metrics:
            metric.update(predictions=predictions, labels={_TASK: labels.double()}, weights=None)  # type: ignore[operator]

    def compute(self) -> dict[str, Tensor]:
        """Values over all ranks, such as ``lifetime_ne`` and ``window_calibration``. All ranks call this together."""
        values: dict[str, Tensor] = {}
        for metric in self.metrics:
            values |= {key.split("|")[1]: value.squeeze(0) for key, value in metric.compute().items()}  # type: ignore[operator]
        return values

    def reset(self) -> None:
        """Forget all rows."""
        for metric in self.metrics:
            metric.reset()  # type: ignore[operator]

    def states_of_ranks(self) -> Tensor:
        """Sums of all rows since the last reset, [ranks, sums]. All ranks call this together."""
        sums = torch.cat([getattr(metric, name) for metric, name in self._sums()])
        if not (dist.is_available() and dist.is_initialized()):
            return sums[None]
        of_ranks = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, sums)
        return torch.stack(of_ranks)

    def load_states_of_ranks(self, states: Tensor) -> None:
        """Continue with the sums that `states_of_ranks` returned. The window starts empty.

        With another number of ranks, rank 0 gets the sums of all ranks.
        """
        self.reset()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        sums = states[rank] if len(states) == ranks else states.sum(0) * (rank == 0)
        for place, (metric, name) in enumerate(self._sums()):
            getattr(metric, name).copy_(sums[place : place + 1])
            metric._update_count = 1  # torchmetrics warns of values without an update

    def _sums(self) -> list[tuple[Metric, str]]:
        return [
            (metric, name)
            for metric in self._computations
            for name in metric._defaults
            if not name.startswith("window_")
        ]
