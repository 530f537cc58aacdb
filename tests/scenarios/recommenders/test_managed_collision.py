"""Managed collision: ids are mapped to rows of smaller tables, and rows are evicted, under each plan and checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.managed_collision import NO_ID
from lightning_pipe.engine import PlanError, SetupError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects
from lightning_pipe.recsys.sharding.shard_model import shard_model
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from tests.distributed import run_ranks
from tests.scenarios.checkpoints import resuming
from tests.strategies.cases import (
    ADAGRAD,
    ROW_WISE_ADAGRAD,
    SGD,
    Clicks,
    Managed,
    Pooled,
    difference,
    fit,
    loader,
    outcome,
    recsys,
    state_of,
)

# With each: what the strategy and the trainer get.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({}, {}),
    "clipping": ({"optimizer": ROW_WISE_ADAGRAD}, {"gradient_clip_val": 0.05}),
    "accumulation": ({"optimizer": SGD}, {"accumulate_grad_batches": 2}),
    "balancing": ({"balancer": True}, {}),
    "bf16 on the wire": ({"quantized_comms": {"forward": "bf16", "backward": "bf16"}}, {}),
}


def trained(plan: str, setting: str, world: int) -> dict[str, Any]:
    strategy, options = SETTINGS[setting]
    module = Clicks(Managed)
    used = fit(module, recsys(plan, **strategy), loader(24 * world), **options)
    return outcome(module, used)


def equal_under_plans(rank: int, world: int, plans: tuple[str, ...], settings: tuple[str, ...]) -> dict[str, Any]:
    """For each setting: what differs under a plan from the serial one, and how much the settings differ."""
    found: dict[str, Any] = {}
    first: Any = None
    for setting in settings:
        serial = trained("serial", setting, world)
        losses = serial.pop("losses")
        for plan in plans:
            piped = trained(plan, setting, world)
            found[f"{setting}, {plan}"] = [] if piped.pop("losses") == losses else ["losses"]
            found[f"{setting}, {plan}"] += difference(serial, piped)
        if first is None:
            first = losses
        elif losses == first and world > 1:  # a single rank exchanges nothing
            found[setting] = "trains as alone"
    return found


def test_plans_train_the_same_tables_and_maps() -> None:
    for found in run_ranks(equal_under_plans, 2, ("threaded_input", "prefetch"), tuple(SETTINGS)):
        assert {name: what for name, what in found.items() if what} == {}


def test_a_run_continues_from_every_checkpoint(tmp_path: Path) -> None:
    setting = resuming.Setting("managed", validates=2)
    for _, found in run_ranks(resuming.from_every_checkpoint, 2, setting, tmp_path):
        assert {name: what for name, what in found.items() if what} == {}


# ---------------------------------------------------------------------- another number of ranks


def rows_of_ids(model: ShardedModel) -> dict[str, dict[int, list[Tensor]]]:
    """The row of each id, and the states of its optimizer, by table."""
    found: dict[str, dict[int, list[Tensor]]] = {}
    for _, one in model.id_maps._maps:
        ids_name, rows_name = one.buffer_names
        (full,) = (name for name, table in model.tables.items() if table.config.name == one.table)
        states = model.full_table_optimizer_state(full)
        whole = [model.full_table(full), *(states[key] for key in sorted(states))]
        entries = all_gather_objects(
            (one.named_row_buffers[ids_name], one.named_row_buffers[rows_name], one.begin, one.end), model._group
        )
        found[one.table] = {}
        for owner, (ids, rows, begin, end) in enumerate(entries):
            taken = ids != NO_ID
            assert sorted(rows.tolist()) == list(range(begin, end))  # each row once
            assert ids.tolist() == sorted(ids.tolist())
            assert one.owners(ids[taken], len(entries)).tolist() == [owner] * int(taken.sum())
            for number, row in zip(ids[taken].tolist(), rows[taken].tolist(), strict=True):
                found[one.table][number] = [values[row].clone() for values in whole]
    return found


class Ids(pl.Callback):
    """Rows of ids when training begins."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.rows = rows_of_ids(trainer.strategy.sharded_model)  # type: ignore[attr-defined]


def write(rank: int, world: int, path: Path, slots: int, optimizer: Any) -> Any:
    used = fit(Clicks(lambda: Managed(slots)), recsys(optimizer=optimizer), loader(30 * world), max_epochs=1)
    used.save_checkpoint(path)
    return rows_of_ids(used.strategy.sharded_model)  # type: ignore[attr-defined]


def read(rank: int, world: int, path: Path, slots: int, optimizer: Any) -> tuple[Any, dict[str, Any]]:
    ids = Ids()
    module = Clicks(lambda: Managed(slots))
    used = fit(module, recsys(optimizer=optimizer), loader(), ckpt_path=path, max_epochs=3, callbacks=[ids])
    assert len(module.losses) > 2
    windows = used.strategy.sharded_model.id_maps.collect_id_histories()  # type: ignore[attr-defined]
    return ids.rows, windows


@pytest.mark.parametrize(("before", "after", "chosen"), [(2, 1, ADAGRAD), (2, 3, ROW_WISE_ADAGRAD), (3, 2, ADAGRAD)])
def test_ids_keep_their_rows_on_another_number_of_ranks(before: int, after: int, chosen: Any, tmp_path: Path) -> None:
    slots = 60  # enough for all ids on any rank
    expected = run_ranks(write, before, tmp_path / "one.ckpt", slots, chosen)[0]
    assert all(len(rows) > 10 for rows in expected.values())
    for found, _ in run_ranks(read, after, tmp_path / "one.ckpt", slots, chosen):
        assert found.keys() == expected.keys()
        for table, rows in expected.items():
            assert found[table].keys() == rows.keys()
            for number, values in rows.items():
                assert all(torch.equal(*pair) for pair in zip(values, found[table][number], strict=True))


def test_ids_without_a_free_row_lose_theirs_and_the_others_keep_theirs(tmp_path: Path) -> None:
    expected = run_ranks(write, 1, tmp_path / "one.ckpt", 12, ADAGRAD)[0]
    found = run_ranks(read, 2, tmp_path / "one.ckpt", 12, ADAGRAD)[0][0]
    lost = 0
    for table, rows in found.items():
        assert rows.keys() <= expected[table].keys()
        lost += len(expected[table].keys() - rows.keys())
        for number, values in rows.items():
            assert all(torch.equal(*pair) for pair in zip(values, expected[table][number], strict=True))
    assert lost > 0  # each rank keeps a row for ids without one


def begin(rank: int, world: int, path: Path, slots: int) -> Any:
    ids = Ids()
    used = fit(Clicks(lambda: Managed(slots)), recsys(init_from=path), loader(), callbacks=[ids], max_epochs=1)
    assert used.global_step == 6 // world
    return ids.rows


@pytest.mark.parametrize(("after", "slots"), [(2, 60), (3, 90)])
def test_a_new_run_starts_with_the_ids_of_another_also_in_larger_tables(after: int, slots: int, tmp_path: Path) -> None:
    expected = run_ranks(write, 2, tmp_path / "one.ckpt", 60, ADAGRAD)[0]
    for found in run_ranks(begin, after, tmp_path / "one.ckpt", slots):
        assert found.keys() == expected.keys()
        for table, rows in expected.items():
            assert found[table].keys() == rows.keys()
            for number, values in rows.items():
                assert all(torch.equal(*pair) for pair in zip(values, found[table][number], strict=True))


def from_unsharded(rank: int, world: int) -> Any:
    module = Clicks(lambda: Managed(60))
    values = dict(module.named_parameters())
    expected: dict[str, dict[int, Tensor]] = {}
    for name, one in module.named_modules():
        if isinstance(one, MCHManagedCollisionModule):
            if rank == 0:  # the first rank's ids are taken
                one.get_buffer("_mch_sorted_raw_ids")[:20] = torch.arange(4, 24)
            table = name.rpartition(".")[2]
            rows = next(rows for parameter, rows in values.items() if f".{table}.weight" in parameter)
            expected[table] = {number + 4: rows[number].detach().clone() for number in range(20)}
    group = torch.distributed.group.WORLD
    assert group is not None
    return expected, rows_of_ids(shard_model(module, device=torch.device("cpu"), group=group, sparse_optimizer=SGD))


@pytest.mark.parametrize("world", [1, 3])
def test_ids_of_an_unsharded_module_keep_their_rows(world: int) -> None:
    results = run_ranks(from_unsharded, world)
    expected = results[0][0]
    for _, found in results:
        for table, rows in expected.items():
            assert found[table].keys() == rows.keys()
            assert all(torch.equal(found[table][number][0], row) for number, row in rows.items())


def test_a_table_with_a_map_does_not_start_with_rows_of_one_without(tmp_path: Path) -> None:
    used = fit(Clicks(Pooled), recsys(), max_epochs=1)
    used.save_checkpoint(tmp_path / "one.ckpt")
    start = {"path": tmp_path / "one.ckpt", "smaller_tables": "cut", "dense": "matching"}
    with pytest.raises(
        SetupError, match=r"people\.weight maps ids to its rows .* but the table in the checkpoint does not"
    ):
        fit(Clicks(Managed), recsys(init_from=start), max_epochs=1)


# ---------------------------------------------------------------------- eviction and pooling


class Small(nn.Module):
    """A table of four rows, one of them for ids without a row, pooled by mean."""

    def __init__(self, slots: int = 4, interval: int = 1, below: int = 100) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="few", embedding_dim=4, num_embeddings=slots, feature_names=["f"], pooling=PoolingType.MEAN
        )
        config.init_fn = nn.init.ones_
        maps = {
            "few": MCHManagedCollisionModule(
                slots, torch.device("cpu"), LRU_EvictionPolicy(), interval, input_hash_size=below
            )
        }
        self.bags = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=[config]), ManagedCollisionCollection(maps, [config])
        )


@pytest.mark.parametrize("optimizer", [ADAGRAD, ROW_WISE_ADAGRAD], ids=["Adagrad", "row-wise Adagrad"])
def test_evicted_rows_begin_anew_with_clear_states(optimizer: dict[str, Any], one_rank: Any) -> None:
    model = Small()
    sharded = shard_model(model, device=torch.device("cpu"), group=one_rank, sparse_optimizer=optimizer)

    def lookup(*ids: int) -> Tensor:
        features = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
        output, _ = model.bags(features)
        found: Tensor = output.values()
        return found

    for _ in range(2):
        lookup(1, 2, 3).sum().backward()
    assert not torch.equal(lookup(1).detach(), torch.ones(1, 4))
    trained_rows = rows_of_ids(sharded)["few"]
    assert trained_rows.keys() == {1, 2, 3}
    assert all(float(values[1].abs().sum()) > 0 for values in trained_rows.values())  # the state of the optimizer
    assert torch.equal(lookup(50, 51).detach(), torch.ones(2, 4))  # in place of the two that are longest unused
    for number, (row, *states) in rows_of_ids(sharded)["few"].items():
        if number in (50, 51):
            assert torch.equal(row, torch.ones(4))
            assert all(float(values.abs().sum()) == 0 for values in states)
        else:
            assert float(states[0].abs().sum()) > 0


def test_bags_are_means_of_the_mapped_rows(one_rank: Any) -> None:
    model = Small()
    sharded = shard_model(model, device=torch.device("cpu"), group=one_rank, sparse_optimizer=SGD)
    with torch.no_grad():
        for parameter in model.bags.parameters():
            parameter.copy_(torch.arange(16.0).reshape(4, 4))
    model.eval()
    features = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9]), lengths=torch.tensor([3, 0]))
    found = model.bags(features)[0].values()
    table = sharded.full_table("few")
    assert torch.equal(
        found, torch.stack([table[3], torch.zeros(4)])
    )  # none has a row of its own: three times the last


def resumed_windows(rank: int, world: int, path: Path) -> list[str]:
    """What differs in this rank's windows after a resumption, when only the last rank's map has had ids."""
    group = torch.distributed.group.WORLD
    assert group is not None

    class First(Clicks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids = torch.tensor([11, 10] if len(self.losses) < 1 else [0, 11])  # of 0 to 11: the last rank's, then both
            features = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([2]))
            self.losses.append(0.0)
            loss: Tensor = self.network.bags(features)[0].values().sum() + self.network.over.weight.sum()  # type: ignore
            return loss

    class Net(Small):
        def __init__(self) -> None:
            super().__init__(slots=12, interval=4, below=12)
            self.over = nn.Linear(1, 1)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1 and not path.exists():
                trainer.save_checkpoint(path)

    whole = fit(First(Net), recsys(), loader(24 * world), callbacks=[Saves()], max_epochs=1)
    used = First(Net)
    used.losses = [0.0]
    rest = fit(used, recsys(), loader(24 * world), ckpt_path=path, max_epochs=1)
    windows = [trainer.strategy.sharded_model.id_maps.collect_id_histories() for trainer in (whole, rest)]  # type: ignore[attr-defined]
    ((one,), (other,)) = (list(found.values()) for found in windows)
    return difference(one, other) + difference(state_of(whole), state_of(rest))


def test_each_rank_continues_its_own_window_also_if_others_have_none(tmp_path: Path) -> None:
    assert run_ranks(resumed_windows, 2, tmp_path / "one.ckpt") == [[], []]


def test_ids_of_32_bits_and_maps_on_the_meta_device_are_taken(one_rank: Any) -> None:
    model = Small()
    config = model.bags.get_submodule("_embedding_module").embedding_bag_configs()[0]
    with torch.device("meta"):
        maps = {"few": MCHManagedCollisionModule(4, torch.device("meta"), LRU_EvictionPolicy(), 1, input_hash_size=100)}
        bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    model.bags = ManagedCollisionEmbeddingBagCollection(bags, ManagedCollisionCollection(maps, [config]))
    sharded = shard_model(model, device=torch.device("cpu"), group=one_rank, sparse_optimizer=SGD)
    features = KeyedJaggedTensor(["f"], torch.tensor([7, 8], dtype=torch.int32), lengths=torch.tensor([2, 0]))
    assert torch.equal(model.bags(features)[0].values().detach(), torch.tensor([[1.0], [0.0]]).expand(2, 4))
    assert rows_of_ids(sharded)["few"].keys() == {7, 8}


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("plan", ["fused_sparse_dist", "semi_sync"])
def test_plans_that_look_up_ahead_are_refused(plan: str) -> None:
    with pytest.raises(PlanError, match="managed collision, whose lookups evict rows"):
        fit(Clicks(Managed), recsys(plan))


def test_too_few_rows_for_the_ranks_are_refused() -> None:
    for message in run_ranks(with_few_rows, 2):
        assert "must have at least two rows on each of its 2 ranks" in message


def with_few_rows(rank: int, world: int) -> str:
    with pytest.raises(SetupError) as refusal:
        fit(Clicks(lambda: Managed(3)), recsys())
    return str(refusal.value)


def test_maps_of_other_kinds_are_refused(one_rank: Any) -> None:
    model = Small()
    config = model.bags._embedding_module.embedding_bag_configs()[0]
    other = HashZchManagedCollisionModule(zch_size=4, device=torch.device("cpu"), total_num_buckets=1)
    model.bags = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=[config]), ManagedCollisionCollection({"few": other}, [config])
    )
    with pytest.raises(SetupError, match="maps ids by a HashZchManagedCollisionModule, expected an MCHManaged"):
        shard_model(model, device=torch.device("cpu"), group=one_rank, sparse_optimizer=SGD)
