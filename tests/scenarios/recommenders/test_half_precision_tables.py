"""Tables of 16 bits: FP16 trains and is read as FP32 everywhere, and BF16 is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.cli.main import main
from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.strategies.cases import (
    ADAGRAD,
    IDS,
    SGD,
    WIDTH,
    Batch,
    Clicks,
    Rows,
    collate,
    difference,
    fit,
    is_table,
    loader,
    predictions,
    recsys,
    state_of,
)
from tests.tiers import wanted

TABLE = "network.bags.embedding_bags.people.weight"
PAST = "network.history.embeddings.past.weight"


class Half(nn.Module):
    """A pooled table and a table of sequences in 16 bits; dense layers in 32."""

    def __init__(self, data_type: DataType = DataType.FP16) -> None:
        super().__init__()
        options: dict[str, Any] = {"embedding_dim": WIDTH, "num_embeddings": IDS, "data_type": data_type}
        self.bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="people", feature_names=["user", "friend"], **options)]
        )
        self.history = EmbeddingCollection(tables=[EmbeddingConfig(name="past", feature_names=["past"], **options)])
        self.over = nn.Sequential(nn.Linear(3 + 3 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
        self.types: set[torch.dtype] = set()

    def forward(self, batch: Batch) -> Tensor:
        past, pooled = self.history(batch.sparse)["past"], self.bags(batch.sparse).values()
        self.types |= {past.values().dtype, pooled.dtype}
        # Without a loop over samples, which torch.export could not trace.
        sums = nn.functional.pad(past.values().cumsum(0), (0, 0, 1, 0))
        ends = past.lengths().long().cumsum(0)
        recent = sums[ends] - sums[ends - past.lengths().long()]
        return self.over(torch.cat([batch.dense, recent, pooled], dim=1))[:, 0]


def _optimizer(module: Clicks) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.network.get_submodule("over").parameters(), lr=0.1)


# ---------------------------------------------------------------------- training

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
KINDS = ("row_wise", "table_wise", "column_wise", "data_parallel")


def on_rank(rank: int, world_size: int, precisions: list[str]) -> dict[str, dict[str, Tensor]]:
    """State after training, of each precision; asserts that it is the same under every sharding and plan.

    Gradients of replicated tables have the type of the table, and are rounded to it.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for precision in precisions:
        for kind, plan in zip(KINDS, ("serial", "prefetch", "compute_ahead", "fused_sparse_dist"), strict=True):
            module = Clicks(Half, optimizers=_optimizer)
            past = "table_wise" if kind == "data_parallel" else kind
            strategy = recsys(plan, {"people": kind, "past": past}, SGD)
            used = fit(module, strategy, loader(in_order=True), max_epochs=1, precision=precision)
            state = state_of(used)
            predictions(used, module, loader(in_order=True))
            assert module.network.types == {torch.float32}
            if kind != "data_parallel":
                assert difference(found.setdefault(precision, state), state) == [], (precision, kind)
            found[f"{precision}, {kind}"] = state
    return found


def by_hand(batch_size: int) -> dict[str, Tensor]:
    """SGD in 32 bits on rows that are rounded to 16 bits after each step, as FBGEMM's kernels do."""
    module = Clicks(lambda: Half(DataType.FP32))
    half = Clicks(Half).state_dict()
    module.load_state_dict({name: value.float() for name, value in half.items()})
    rates = {True: 0.5, False: 0.1}
    rows = Rows()
    for first in range(0, len(rows), batch_size):
        loss = module.loss_of(collate([rows[place] for place in range(first, first + batch_size)]))
        loss.backward()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=rates[is_table(name)])
                if is_table(name):
                    parameter.copy_(parameter.half())
                parameter.grad = None
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_tables_of_16_bits_train_as_by_hand_under_every_sharding(world_size: int, pytestconfig: pytest.Config) -> None:
    precisions = wanted(pytestconfig, PRECISIONS, lambda precision: precision != "16-mixed")
    for found in run_ranks(on_rank, world_size, precisions):
        expected = by_hand(4 * world_size)
        for kind in ("row_wise", "data_parallel"):
            for name in (TABLE, PAST):
                values = found[f"32-true, {kind}"][name]
                assert values.dtype == torch.float16
                # Sums in another order may be rounded to the neighbor in 16 bits, at most in each of six steps.
                distance = (values.float() - expected[name]).abs()
                assert distance.max() <= 6 * 2.0**-11 * expected[name].abs().max()
                assert (distance == 0).float().mean() > 0.9


def test_a_replicated_table_of_16_bits_steps_in_32_bits_as_one_that_is_sharded() -> None:
    """In 16 bits, Adagrad's eps is 0, and rows without a gradient would become 0 / 0."""
    states = {}
    for kind in ("row_wise", "data_parallel"):
        strategy = recsys("prefetch", {"people": kind}, ADAGRAD)
        states[kind] = state_of(fit(Clicks(Half, optimizers=_optimizer), strategy, loader(in_order=True), max_epochs=1))
    sharded, replicated = states.values()
    assert replicated[f"{TABLE} momentum1"].dtype == torch.float32
    # A step moves a value by up to the rate of 0.1. Six roundings of values below 1, and of gradients, move it by at
    # most 12 * 2^-11; another optimizer, or none, by far more.
    distance = (replicated[TABLE].float() - sharded[TABLE].float()).abs()
    assert distance.max() < 2 * 12 * 2.0**-11  # twice: later gradients differ, too
    assert (replicated[TABLE].float() - Clicks(Half).state_dict()[TABLE].float()).abs().max() > 0.1


def refused(rank: int, world_size: int) -> str:
    with pytest.raises(SetupError) as caught:
        fit(Clicks(lambda: Half(DataType.BF16)), recsys(optimizer=SGD))
    return str(caught.value)


def test_tables_in_bf16_are_refused_by_name_on_every_rank() -> None:
    for message in run_ranks(refused, 2):
        assert f"table {TABLE} has the data_type BF16" in message
        assert "Use DataType.FP32 or DataType.FP16" in message


# ---------------------------------------------------------------------- checkpoints and artifacts


class Served(Clicks):
    def __init__(self) -> None:
        super().__init__(Half, optimizers=_optimizer)

    def val_dataloader(self) -> Any:
        return loader()


CONFIG = f"""
model: {{class_path: {__name__}.Served}}
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_pipe.strategies.RecsysPipelineStrategy
    init_args: {{sparse_optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.5}}}}}}
"""


def test_a_run_resumes_in_the_middle_of_an_epoch_and_its_tables_are_exported_as_they_are(
    tmp_path: Path, capsys: Any
) -> None:
    whole = Served()
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0, "enable_checkpointing": True}
    used = fit(whole, recsys(optimizer=SGD), callbacks=[saving], **options)
    resumed = Served()
    again = fit(resumed, recsys(optimizer=SGD), ckpt_path=tmp_path / "step=4.ckpt", **options)
    assert resumed.losses == whole.losses[4:]
    assert difference(state_of(used), state_of(again)) == []
    used.save_checkpoint(tmp_path / "end.ckpt")

    export_checkpoint(tmp_path / "end.ckpt", tmp_path / "end.pt")
    plain = Served()
    plain.load_state_dict(torch.load(tmp_path / "end.pt")["state_dict"])
    state = state_of(used)
    assert (
        difference(
            {name: state[name] for name in (TABLE, PAST)},
            {TABLE: plain.get_parameter(TABLE).detach(), PAST: plain.get_parameter(PAST).detach()},
        )
        == []
    )
    batch = next(iter(loader()))
    with torch.no_grad():
        expected = plain.eval().predict_step(batch, 0)
    assert plain.network.types == {torch.float32}
    scores = predictions(used, whole, loader())
    assert torch.allclose(scores[: len(expected)], expected, rtol=0, atol=1e-6)

    (tmp_path / "config.yaml").write_text(CONFIG)
    assert main(["export", str(tmp_path / "end.ckpt"), "--to", "rows", "--out", str(tmp_path / "rows")]) == 0
    people = pq.read_table(next((tmp_path / "rows").glob("*people*.parquet"))).to_pydict()
    values = torch.tensor(people["vector"])[torch.tensor(people["id"]).argsort()]
    assert torch.equal(values.half(), state[TABLE])
    out = tmp_path / "model.pt2"
    arguments = ["export", str(tmp_path / "end.ckpt"), "--to", "torch_export", "--out", str(out)]
    assert main([*arguments, "--config", str(tmp_path / "config.yaml")]) == 0, capsys.readouterr().err
    names = [entry["name"] for entry in json.loads((tmp_path / "model.pt2.inputs.json").read_text())["inputs"]]
    lengths = batch.sparse.lengths().view(4, -1)
    tensors = {"dense": batch.dense, "sparse.values": batch.sparse.values(), "sparse.lengths": lengths}
    with torch.no_grad():
        found = torch.export.load(out).module()(*(tensors[name] for name in names))
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
