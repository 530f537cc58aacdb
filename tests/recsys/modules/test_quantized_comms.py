"""Embeddings and gradients that travel in 16 or 8 bits: how far off they are, how many bytes they take, what cannot be.

How far a number may be off follows from its format alone. One that is rounded to p significant bits is off by at most
its 2**-p part, and in fp16 (p = 11), below the smallest normal number, by 2**-25; in bf16 p is 8. In int8 a row is cut
into 255 steps between its least and its greatest value, so that it is off by half a step. Where ranks add up parts of
a pooled embedding, each part is rounded, and each sum of parts is. A sum of n terms in 32 bits is off by at most n / 2
last places of the sum of their absolute values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.traffic import recorded_traffic
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import option_group
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.sharding.sharders import default_sharders
from tests.distributed import run_ranks
from tests.recsys.rewrite_cases import WIDTH, Bags, Batch, batches, groups, variable_batches
from tests.recsys.sharding_cases import (
    BATCH,
    SGD,
    SumPooled,
    constraints_for,
    make_batch,
    make_model,
    shard,
    tables_of,
)
from tests.rounding import Reference
from tests.tiers import sampled, wanted

BITS = {"fp16": 11, "bf16": 8}
PRECISIONS = ["fp16", "bf16", "int8"]
ADDED_UP = ["row_wise", "table_row_wise", "grid_shard"]
# Sharding types of pooled tables, and of the sequence table.
ONE_NODE = [
    ("table_wise", "table_wise"),
    ("column_wise", "row_wise"),
    ("table_column_wise", "column_wise"),
    ("row_wise", "table_wise"),
    ("data_parallel", "table_wise"),
]
# Ids of a bag, at most (see make_batch).
LONGEST = 3
TWO_NODES = [
    ("table_row_wise", "row_wise", "fp16"),
    ("grid_shard", "row_wise", "bf16"),
    ("table_column_wise", "row_wise", "int8"),
]
POSSIBLE = [(*pair, one) for pair in ONE_NODE for one in PRECISIONS if one != "int8" or pair[0] not in ADDED_UP]
RATE = 0.5  # SGD's
# A sum of errors that are spread evenly is off by more with a probability below 3e-8 (see tests/rounding.py).
DEVIATIONS = 6
LAST_PLACE = torch.finfo(torch.float32).eps


def both(precision: str, **options: Any) -> dict[str, Any]:
    return {"forward": precision, "backward": precision, **options}


def often(case: tuple[str, ...]) -> bool:
    """Each kind of tables in one format."""
    pooled, sequence, precision = case
    formats = {
        ("table_wise", "table_wise"): "int8",
        ("column_wise", "row_wise"): "bf16",
        ("table_column_wise", "column_wise"): "fp16",
        ("row_wise", "table_wise"): "fp16",
        ("data_parallel", "table_wise"): "bf16",
    }
    return formats[pooled, sequence] == precision


# ---------------------------------------------------------------------- how far off


def outputs(model: nn.Module, batch: tuple[KeyedJaggedTensor, KeyedJaggedTensor]) -> list[Tensor]:
    """Of the pooled module and the sequence module: rows x columns."""
    bags, sequences = batch
    return [model.get_submodule("pooled")(bags).values(), model.get_submodule("sequence")(sequences)["past"].values()]


def may_be_off(
    precision: str, values: Tensor, magnitude: Tensor, world_size: int, terms: int, width: int = 8
) -> Tensor:
    """How far values may be off after a way over the wire.

    Args:
        precision: of the way.
        values: exact; rows x columns, of tables *width* columns wide.
        magnitude: sum of the absolute values of all that is added up in each.
        world_size: at most so many parts are added up.
        terms: at most so many are added up in 32 bits, here and in the exact values.
        width: of a row, in columns.
    """
    in_32_bits = terms * LAST_PLACE * magnitude
    if precision == "int8":
        rows = values.reshape(-1, width)
        steps = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / 255
        # FBGEMM adds 1e-8 to a row's range. Its sums and products of range, step and least value round six times.
        of_codec = 1e-8 + 6 * LAST_PLACE * rows.abs().amax(1, keepdim=True)
        return (steps / 2 + of_codec).expand_as(rows).reshape(values.shape) + in_32_bits
    roundings = 2 * world_size - 1  # of so many parts, and of their sums
    off = (1 + 2.0 ** -BITS[precision]) ** roundings - 1
    return off * magnitude + (2.0**-25 * roundings if precision == "fp16" else 0.0) + in_32_bits


def off_by(case: tuple[str, str, str], rank: int, world_size: int) -> dict[str, bool]:
    """Whether outputs and tables are as near to the unsharded ones as they should be, and whether they are off."""
    pooled, sequence, precision = case
    model, exact, absolute = (make_model(SumPooled) for _ in range(3))
    with torch.no_grad():
        for parameter in tables_of(absolute).values():
            parameter.abs_()
    sharded = shard(
        model, sparse_optimizer=SGD, constraints=constraints_for(pooled, sequence), quantized_comms=both(precision)
    )
    found = outputs(model, make_batch(0, rank))
    forward = [
        (one - value).abs() <= may_be_off(precision, value, magnitude, world_size, LONGEST + world_size)
        for one, value, magnitude in zip(
            found, outputs(exact, make_batch(0, rank)), outputs(absolute, make_batch(0, rank)), strict=True
        )
    ]
    differs = [
        not torch.equal(one, value) for one, value in zip(found, outputs(exact, make_batch(0, rank)), strict=True)
    ]
    before = {name: parameter.detach().clone() for name, parameter in tables_of(exact).items()}
    gradients = [
        [torch.randn(one.shape, generator=torch.Generator().manual_seed(other)) for one in of_rank]
        for other, of_rank in enumerate(outputs(exact, make_batch(0, other)) for other in range(world_size))
    ]
    torch.autograd.backward(found, gradients[rank])
    sharded.step_data_parallel_tables()
    ids = sum(of.values().numel() for other in range(world_size) for of in make_batch(0, other))
    allowed = make_model(SumPooled)  # the sum of what the gradients of each row's bags may be off by
    for other in range(world_size):
        given = make_batch(0, other)
        torch.autograd.backward(outputs(exact, given), [one / world_size for one in gradients[other]])
        errors = [may_be_off(precision, one, one.abs(), 1, ids) / world_size for one in gradients[other]]
        torch.autograd.backward(outputs(allowed, given), errors)
    backward, moved = [], []
    for name, parameter in tables_of(exact).items():
        assert parameter.grad is not None
        limit = tables_of(allowed)[name].grad
        assert limit is not None
        after = before[name] - RATE * parameter.grad
        table = sharded.full_table(name)
        # Both differences of table and gradient are rounded.
        backward.append((table - after).abs() <= RATE * limit + LAST_PLACE * (before[name].abs() + after.abs()))
        moved.append(not torch.equal(table, before[name]))
    return {
        "forward": all(bool(one.all()) for one in forward),
        "backward": all(bool(one.all()) for one in backward),
        "pooled off": differs[0],
        "sequences off": differs[1],
        "moved": all(moved),
    }


# ---------------------------------------------------------------------- how many bytes


def bytes_sent(precision: str) -> list[int]:
    """By all-to-alls of a table-wise step, forward and backward, in the order of their submissions."""
    model = make_model(SumPooled)
    shard(model, constraints=constraints_for("table_wise"), quantized_comms=both(precision))
    bags, sequences = make_batch(0, dist.get_rank())
    outputs(model, (bags, sequences))  # the first input dist asks more of the ranks
    with recorded_traffic() as sent:
        pooled = model.get_submodule("pooled")(bags).values()
        sizes = [sent[-1].bytes]  # after splits, lengths and ids
        recent = model.get_submodule("sequence")(sequences)["past"].values()
        sizes.append(sent[-1].bytes)
        before = len(sent)
        torch.autograd.backward([pooled, recent], [torch.ones_like(pooled), torch.ones_like(recent)])
    return sizes + [one.bytes for one in sent[before:]]


def reduced_bytes(precision: str) -> dict[str, int]:
    """By the reduce-scatter of a row-wise step, and by the all-gather of its backward."""
    model = make_model(SumPooled)
    shard(model, constraints=constraints_for("row_wise"), quantized_comms=both(precision))
    sent: dict[str, int] = {}

    def noting(name: str) -> Any:
        collective = getattr(dist, name)

        def noted(output: Tensor, given: Tensor, *arguments: Any, **named: Any) -> Any:
            sent[name] = max(output.nbytes, given.nbytes)
            return collective(output, given, *arguments, **named)

        return mock.patch.object(dist, name, noted)

    with noting("reduce_scatter_tensor"), noting("all_gather_into_tensor"):
        found = outputs(model, make_batch(0, dist.get_rank()))
        torch.autograd.backward(found, [torch.ones_like(one) for one in found])
    return sent


# ---------------------------------------------------------------------- options


SMALL = 1e-8  # gradients that are nothing in fp16


def moved_by_small_gradients(scale: float | None) -> float:
    """How far small gradients move a table, over how far they should."""
    model = make_model(SumPooled)
    comms = {"backward": "fp16"} if scale is None else {"backward": "fp16", "backward_loss_scale": scale}
    sharded = shard(
        model,
        sparse_optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 1e6}},
        constraints=constraints_for("table_wise"),
        quantized_comms=comms,
    )
    before = sharded.full_table("users")
    pooled = model.get_submodule("pooled")(make_batch(0, dist.get_rank())[0]).values()
    pooled.backward(torch.full_like(pooled, SMALL))
    counts = torch.zeros(len(before))
    for rank in range(dist.get_world_size()):
        counts += torch.bincount(make_batch(0, rank)[0].values(), minlength=len(before))
    expected = (SMALL * 1e6 / dist.get_world_size() * counts).sum()
    return float((before - sharded.full_table("users"))[:, 0].sum() / expected)


def norms(precision: str) -> tuple[float, float, float]:
    """Of the tables' gradients, as clipping takes it, and of how far the tables then moved; how far off that may be."""
    model = make_model(SumPooled)
    kinds = constraints_for("table_wise", "row_wise")
    sharded = shard(model, sparse_optimizer=SGD, constraints=kinds, quantized_comms=both(precision))
    rewrite = ModelRewrite(_Step(sharded.module), split_backward=True, **groups())
    try:
        for step in range(2):  # the first one is recorded
            batch = make_batch(step, dist.get_rank())
            before = [sharded.full_table(name) for name in sharded.tables]
            features = rewrite.wait_inputs(rewrite.wait_splits(rewrite.start_input_dist(batch)))
            embeddings = rewrite.lookup(features)
            with rewrite.serving(embeddings, batch):
                rewrite.model(batch).backward()
            norm = sharded.table_gradient_norm(rewrite.tables_backward.begin(embeddings))
            rewrite.backward(embeddings)
    finally:
        rewrite.restore()
    start = torch.cat([table.flatten() for table in before]).double()
    moved = start - torch.cat([sharded.full_table(name).flatten() for name in sharded.tables]).double()
    # New rows are rounded to half a last place, and a norm of so many numbers like their sum.
    of_rows = LAST_PLACE / 2 * float(start.norm() + moved.norm()) / RATE
    of_norm = DEVIATIONS * LAST_PLACE / 2 * len(start) ** 0.5 * float(norm)
    return float(norm), float(moved.norm() / RATE), of_rows + of_norm


class _Step(nn.Module):
    """Takes the batch as one argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return self.model(*batch)


def uneven(precision: str, data: Sequence[Batch]) -> bool:
    """Whether pooled embeddings are near those in 32 bits."""
    model, exact, absolute = Bags(), Bags(), Bags()
    with torch.no_grad():
        for parameter in absolute.parameters():
            parameter.abs_()
    names = [name.split(".")[-2] for name, _ in model.named_parameters() if "embedding" in name]
    constraints = {name: {"sharding_types": ["table_wise"]} for name in names}
    for module, comms in ((model, both(precision)), (exact, None), (absolute, None)):
        shard(module, sparse_optimizer=SGD, constraints=constraints, quantized_comms=comms)
    near = []
    for batch in data:
        found = model.get_submodule("a")(batch.sparse).values()
        value, magnitude = (one.get_submodule("a")(batch.sparse).values() for one in (exact, absolute))
        limit = may_be_off(precision, value, magnitude, 1, LONGEST, WIDTH)
        near.append(bool(((found - value).abs() <= limit).all()))
    return all(near)


# ---------------------------------------------------------------------- refusals


def refused(**arguments: Any) -> str:
    with pytest.raises(SetupError) as caught:
        shard(make_model(), **arguments)
    return str(caught.value)


def planned_rows() -> ShardingPlan:
    """A plan of row-wise tables, as another run may have made it."""
    sharded = shard(make_model(), constraints=constraints_for("row_wise"))
    plan = sharded.dmp._plan
    assert isinstance(plan, ShardingPlan)
    return plan


def refusals(rank: int) -> dict[str, str]:
    return {
        "constraints": refused(constraints=constraints_for("row_wise"), quantized_comms=both("int8")),
        "plan": refused(sharding_plan=planned_rows(), quantized_comms={"forward": "int8"}),
        "row": refused(
            constraints=constraints_for("column_wise"), quantized_comms=both("int8", int8_row_dim=8)
        ),  # the shards have 4 columns
        "other ranks": refused(quantized_comms=both("fp16") if rank == 0 else None),
        "sharders": refused(quantized_comms=both("fp16"), sharders=default_sharders()),
    }


# ---------------------------------------------------------------------- what the ranks run


def on_two_ranks(rank: int, world_size: int, cases: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    chosen = shard(make_model(), quantized_comms=both("int8"))
    return {
        "off": {case: off_by(case, rank, world_size) for case in POSSIBLE if case in cases},
        "bytes": {precision: bytes_sent(precision) for precision in ["fp32", *PRECISIONS]},
        "reduced": {precision: reduced_bytes(precision) for precision in ["fp32", "fp16", "bf16"]},
        "small": {scale: moved_by_small_gradients(scale) for scale in (None, 1024.0)},
        "norms": {precision: norms(precision) for precision in PRECISIONS},
        "uneven": {
            # Each feature has its own batch size, or each rank has.
            precision: [uneven(precision, variable_batches(2)), uneven(precision, batches(2, size=3 + rank))]
            for precision in PRECISIONS
        },
        "refusals": refusals(rank),
        "chosen": {table.sharding_type for table in chosen.tables.values() if table.module_name == "pooled"},
    }


def on_two_nodes(rank: int, world_size: int) -> dict[Any, dict[str, bool]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return {case: off_by(case, rank, world_size) for case in TWO_NODES}


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, wanted(request.config, POSSIBLE, often))


@pytest.fixture(scope="module")
def two_nodes() -> list[dict[Any, dict[str, bool]]]:
    return run_ranks(on_two_nodes, 4)


@pytest.mark.parametrize("case", sampled(POSSIBLE, often, "-".join))
def test_embeddings_and_gradients_are_off_by_no_more_than_their_format(
    two_ranks: list[dict[str, Any]], case: tuple[str, str, str]
) -> None:
    for found in two_ranks:
        off = found["off"][case]
        assert off == {
            "forward": True,
            "backward": True,
            "pooled off": case[0] != "data_parallel",  # nothing of it travels
            "sequences off": True,
            "moved": True,
        }


@pytest.mark.parametrize("case", TWO_NODES, ids="-".join)
def test_embeddings_and_gradients_between_nodes_are_off_by_no_more_than_their_format(
    two_nodes: list[dict[Any, dict[str, bool]]], case: tuple[str, str, str]
) -> None:
    for found in two_nodes:
        assert all(found[case].values()), found[case]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_batches_of_any_size_can_be_cut_into_rows(two_ranks: list[dict[str, Any]], precision: str) -> None:
    assert [found["uneven"][precision] for found in two_ranks] == [[True, True]] * 2


def test_bytes_of_all_to_alls_are_what_the_format_says(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        sent = found["bytes"]
        print({precision: sum(sizes) for precision, sizes in sent.items()})
        assert len(sent["fp32"]) == 4
        assert sum(sent["fp32"]) > 0
        for precision, of_8_columns in (("fp16", 16), ("bf16", 16), ("int8", 8 + 8)):
            assert sent[precision] == [size * of_8_columns // 32 for size in sent["fp32"]], precision


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_bytes_of_reduce_scatters_are_half(two_ranks: list[dict[str, Any]], precision: str) -> None:
    for found in two_ranks:
        full, half = found["reduced"]["fp32"], found["reduced"][precision]
        assert full == {"reduce_scatter_tensor": 2 * BATCH * 24 * 4, "all_gather_into_tensor": 2 * BATCH * 24 * 4}
        assert half == {name: size // 2 for name, size in full.items()}


def test_a_loss_scale_saves_gradients_that_are_nothing_in_fp16(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["small"][None] == 0.0
        # Half a step of fp16's smallest numbers, over what travels: on each rank half of the scaled gradient. A table
        # that moves by some 1e-2 is rounded by 1e-8.
        assert found["small"][1024.0] == pytest.approx(1.0, rel=2.0**-25 / (1024 * SMALL / 2) + 1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_clipped_by_the_norm_of_what_arrives_at_the_tables(
    two_ranks: list[dict[str, Any]], precision: str
) -> None:
    (norm, moved, within), (other_norm, *_) = (found["norms"][precision] for found in two_ranks)
    assert norm == pytest.approx(moved, rel=0.0, abs=within)
    assert norm == other_norm


def test_the_planner_chooses_types_that_int8_can_travel_under(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["chosen"]
        assert not found["chosen"] & set(ADDED_UP)


REFUSED = {
    "constraints": "names row_wise for table pooled.embedding_bags.users.weight",
    "plan": "the sharding plan of table pooled.embedding_bags.users.weight names row_wise",
    "row": "must be 4 or one of its divisors, to divide the widths of all shards",
    "other ranks": "the module differs between ranks",
    "sharders": "sharders bring their own codecs",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_travel_is_refused_on_every_rank_when_tables_are_sharded(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    for found in two_ranks:
        assert REFUSED[name] in found["refusals"][name]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_one_rank_nothing_travels_and_nothing_is_off(precision: str) -> None:
    model, exact = make_model(), make_model()
    shard(model, quantized_comms=both(precision))
    expected = Reference.of(lambda: dict(zip(("pooled", "past"), outputs(exact, make_batch(0, 0)), strict=True)))
    found = dict(zip(("pooled", "past"), outputs(model, make_batch(0, 0)), strict=True))
    assert expected.differences(found) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp16", "quantized_comms is 'fp16'; expected a mapping of forward, "),
        ({"forwards": "fp16"}, "quantized_comms has 'forwards'; expected only forward, backward"),
        (
            {"forward": "float16"},
            "quantized_comms is 'float16'; expected one of 'fp32', 'fp16', 'bf16', 'int8'",
        ),
        ({"backward": None}, "backward of quantized_comms is None; expected one of"),
        ({"forward": ["fp16"]}, r"forward of quantized_comms is \['fp16'\]; expected one of"),
        ({"forward": "fp16", "forward_loss_scale": 10**400}, "must be a positive number of 32 bits"),
        (
            {"backward": "fp16", "backward_loss_scale": 0},
            "backward_loss_scale of .* must be a positive .*, got 0",
        ),
        ({"forward": "int8", "int8_row_dim": 1.5}, "int8_row_dim of quantized_comms is 1.5; expected a whole number"),
    ],
)
def test_an_option_that_cannot_be_is_named(config: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        option_group(QuantizedComms, "quantized_comms", config)


def test_one_that_is_made_by_hand_is_checked_as_well() -> None:
    with pytest.raises(SetupError, match="forward of quantized_comms is 'fp8'; expected one of"):
        QuantizedComms(forward="fp8")
    with pytest.raises(SetupError, match=r"forward_loss_scale of .* must be a positive number .*, got -1\.0"):
        QuantizedComms(forward="fp16", forward_loss_scale=-1.0)


def test_nothing_is_quantised_unless_it_is_asked_for() -> None:
    assert QuantizedComms() == QuantizedComms("fp32", "fp32")
    assert QuantizedComms().registry() is None
    assert not QuantizedComms(forward="fp32").quantizes
