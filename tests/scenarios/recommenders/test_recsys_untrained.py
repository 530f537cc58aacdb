"""What the user takes out of training stays untrained, or is refused; sequences may be changed in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rounding import Reference
from tests.strategies.cases import (
    SGD,
    Batch,
    Clicks,
    Mixed,
    Sequenced,
    fit,
    is_table,
    recsys,
    state_of,
)


class WithoutGrad(Mixed):
    """Looks some tables up under no_grad, and trains the rest."""

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            fixed = self.bags(batch.sparse).values()
        parts = [batch.dense, fixed, self.weighted(batch.tags)["tag"]]
        return self.over(self.drop(self.normalize(torch.cat(parts, dim=1))))[:, 0]


class ChangedInPlace(Sequenced):
    """Scales the rows it has looked up in place."""

    def forward(self, batch: Batch) -> Tensor:
        past = self.history(batch.sparse)["past"]
        past.values().mul_(0.5)
        recent = torch.stack([row.sum(0) for row in past.to_dense()])
        return self.over(torch.cat([batch.dense, recent, self.bags(batch.sparse)["user"]], dim=1))[:, 0]


@pytest.mark.parametrize(
    ("network", "plan"),
    [
        (WithoutGrad, "base"),
        (WithoutGrad, "fused_sparse_dist"),
        (ChangedInPlace, "threaded_input"),
        (ChangedInPlace, "fused_sparse_dist"),
    ],
)
def test_training_is_that_of_lightnings_own_loop(network: Any, plan: str) -> None:
    ours = Clicks(network)
    before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}

    def unsharded() -> dict[str, Any]:
        theirs = Clicks(network, in_backward=SGD)
        state = state_of(fit(theirs, "auto"))
        return {"losses": theirs.losses, **{name: state[name] for name in before if is_table(name)}}

    found = state_of(fit(ours, recsys(plan, optimizer=SGD)))
    assert Reference.of(unsharded).differences({"losses": ours.losses, **found}) == []
    moved = {name.split(".")[1] for name in before if is_table(name) and not torch.equal(found[name], before[name])}
    assert moved == ({"weighted"} if network is WithoutGrad else {"history", "bags"})
