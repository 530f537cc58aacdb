"""Ranks on several machines train what ranks of one machine do, only ids, rows and gradients travel otherwise."""

from __future__ import annotations

from typing import Any
from unittest import mock

from lightning_pipe.engine.ranks import gloo_all_to_all, object_collectives
from tests.distributed import run_ranks
from tests.scenarios.recommenders.test_every_plan import FEATURES
from tests.strategies.cases import difference, fit, loader, recsys, state_of

PLANS = ("serial", "prefetch", "compute_ahead")


def both_ways(rank: int, world_size: int) -> dict[str, Any]:
    """Names of what differs, and where all-to-alls were made of messages, in how many groups."""
    sent: list[tuple[str, Any]] = []
    exchange = gloo_all_to_all._FullDuplexGroup.all_to_all_single

    def counted(*arguments: Any) -> Any:
        sent.append((where, arguments[0]))
        return exchange(*arguments)

    found: dict[str, Any] = {}
    feature = FEATURES["sequences"]
    for plan in PLANS:
        states, losses, sent[:] = {}, {}, []
        for where in ("one", "several"):
            place = object_collectives.host_id() if where == "one" else (f"machine {rank // 2}", 0)
            with (
                mock.patch.object(object_collectives, "host_id", return_value=place),
                mock.patch.multiple(gloo_all_to_all._FullDuplexGroup, all_to_all_single=counted, alltoall_base=counted),
            ):
                module, strategy = feature.module(), recsys(plan, feature.kinds, feature.optimizer)
                states[where] = state_of(fit(module, strategy, loader(16 * world_size)))
            losses[where] = module.losses
        assert len(losses["one"]) == 8
        differs = difference(states["one"], states["several"])
        found[plan] = (
            differs,
            losses["one"] == losses["several"],
            sorted((where, len({id(group) for at, group in sent if at == where})) for where in {at for at, _ in sent}),
        )
    return found


def test_plans_train_on_several_machines_what_they_train_on_one() -> None:
    for found in run_ranks(both_ways, 3):
        assert found == dict.fromkeys(PLANS, ([], True, [("several", 2)]))
