"""Embeddings and gradients that travel in 16 or 8 bits: how far off they are, how many bytes they take, what cannot be.

How far a number may be off follows from its format alone. One that is rounded to p significant bits is off by at most
its 2**-p part, and in fp16 (p = 11), below the smallest normal number, by 2**-25; in bf16 p is 8. In int8 a row is cut
into 255 steps between its least and its greatest value, so that it is off by half a step. Where ranks add up parts of
a pooled embedding, each part is rounded, and each sum of parts is. A sum of n terms in 32 bits is off by at most n / 2
last places of the sum of their absolute values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.traffic import recorded_traffic
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import parse_option_group
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms
from lightning_pipe.recsys.sharding.sharders import default_sharders
from tests.distributed import run_ranks
from tests.recsys.sharding_cases import (
    SGD,
    SumPooled,
    constraints_for,
    make_batch,
    make_model,
    shard,
    tables_of,
)
from tests.rounding import Reference

BITS = {"fp16": 11, "bf16": 8}
PRECISIONS = ["fp16", "bf16", "int8"]
ADDED_UP = ["row_wise", "table_row_wise", "grid_shard"]
# Each kind of tables in one format.
CASES = [
    ("table_wise", "table_wise", "int8"),
    ("column_wise", "row_wise", "bf16"),
    ("table_column_wise", "column_wise", "fp16"),
    ("row_wise", "table_wise", "fp16"),
    ("data_parallel", "table_wise", "bf16"),
]
# Ids of a bag, at most (see make_batch).
LONGEST = 3
RATE = 0.5  # SGD's
LAST_PLACE = torch.finfo(torch.float32).eps


def both(precision: str, **options: Any) -> dict[str, Any]:
    return {"forward": precision, "backward": precision, **options}


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
        "other ranks": refused(quantized_comms=both("fp16") if rank == 0 else None),
        "sharders": refused(quantized_comms=both("fp16"), sharders=default_sharders()),
    }


# ---------------------------------------------------------------------- what the ranks run


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    chosen = shard(make_model(), quantized_comms=both("int8"))
    return {
        "off": {case: off_by(case, rank, world_size) for case in CASES},
        "bytes": {precision: bytes_sent(precision) for precision in ["fp32", *PRECISIONS]},
        "small": {scale: moved_by_small_gradients(scale) for scale in (None, 1024.0)},
        "refusals": refusals(rank),
        "chosen": {table.sharding_type for table in chosen.tables.values() if table.module_name == "pooled"},
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("case", CASES, ids="-".join)
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


def test_bytes_of_all_to_alls_are_what_the_format_says(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        sent = found["bytes"]
        print({precision: sum(sizes) for precision, sizes in sent.items()})
        assert len(sent["fp32"]) == 4
        assert sum(sent["fp32"]) > 0
        for precision, of_8_columns in (("fp16", 16), ("bf16", 16), ("int8", 8 + 8)):
            assert sent[precision] == [size * of_8_columns // 32 for size in sent["fp32"]], precision


def test_a_loss_scale_saves_gradients_that_are_nothing_in_fp16(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["small"][None] == 0.0
        # Half a step of fp16's smallest numbers, over what travels: on each rank half of the scaled gradient. A table
        # that moves by some 1e-2 is rounded by 1e-8.
        assert found["small"][1024.0] == pytest.approx(1.0, rel=2.0**-25 / (1024 * SMALL / 2) + 1e-6)


def test_the_planner_chooses_types_that_int8_can_travel_under(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["chosen"]
        assert not found["chosen"] & set(ADDED_UP)


REFUSED = {
    "constraints": "names row_wise for table pooled.embedding_bags.users.weight",
    "plan": "the sharding plan of table pooled.embedding_bags.users.weight names row_wise",
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
    ],
)
def test_an_option_that_cannot_be_is_named(config: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        parse_option_group(QuantizedComms, "quantized_comms", config)


def test_one_that_is_made_by_hand_is_checked_as_well() -> None:
    with pytest.raises(SetupError, match="forward of quantized_comms is 'unknown'; expected one of"):
        QuantizedComms(forward="unknown")
    with pytest.raises(SetupError, match=r"forward_loss_scale of .* must be a positive number .*, got -1\.0"):
        QuantizedComms(forward="fp16", forward_loss_scale=-1.0)
