"""What the tests of the balancer try on ranks: batches of every kind, told apart by the number of each sample."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_pipe.engine import InputError
from lightning_pipe.recsys import BatchBalancer
from tests.recsys.sharding_cases import CPU

Pair = namedtuple("Pair", ["label", "names"])


@dataclass
class Inner:
    """Two tensors and what is none."""

    flag: torch.Tensor
    weighted: KeyedJaggedTensor
    note: str = "kept"


def ids_of(sample: int) -> list[list[int]]:
    """Two lists of ids, which say whose they are."""
    return [
        [100 * sample + place for place in range((sample * 7 + key * 3) % 6 + (sample == 1) * 9)] for key in range(2)
    ]


def jagged(samples: list[int], weighted: bool = False) -> KeyedJaggedTensor:
    lists = [ids_of(sample)[key] for key in range(2) for sample in samples]
    values = torch.tensor([one for ids in lists for one in ids], dtype=torch.int64)
    lengths = torch.tensor([len(ids) for ids in lists], dtype=torch.int32)
    weights = values.float() / 10 if weighted else None
    return KeyedJaggedTensor(["a", "b"], values, weights, lengths=lengths, stride=len(samples))


def batch_of(samples: list[int]) -> dict[str, Any]:
    """Every kind of part, of samples with these numbers: all is a function of the number."""
    number = torch.tensor(samples, dtype=torch.int64)
    lists = [ids_of(sample)[0] for sample in samples]
    return {
        "number": number,
        "dense": number[:, None, None] + torch.tensor([[0.25, 0.5], [1.0, 2.0]]),
        "half": number.bfloat16(),
        "nothing": torch.zeros(len(samples), 0),
        "ids": jagged(samples),
        "inner": Inner(number % 2 == 0, jagged(samples, weighted=True)),
        "pair": Pair(number.double() * 2, ["x", "y", "z"] * 9),
        "list": [
            JaggedTensor(
                torch.tensor([one for ids in lists for one in ids], dtype=torch.float64)[:, None].expand(-1, 2),
                lengths=torch.tensor([len(ids) for ids in lists], dtype=torch.int64),
            ),
            KeyedTensor(["p", "q"], [1, 2], number.float()[:, None] * torch.tensor([1.0, 2.0, 3.0])),
        ],
        "scalar": torch.tensor(float(dist.get_rank())),
        "rank": dist.get_rank(),
    }


def plain(value: Any) -> Any:
    """What can be compared with ==."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, (KeyedJaggedTensor, JaggedTensor)):
        keys = value.keys() if isinstance(value, KeyedJaggedTensor) else []
        parts = (value.lengths(), value.values(), value.weights_or_none())
        return keys, [None if part is None else plain(part) for part in parts]
    if isinstance(value, KeyedTensor):
        return value.keys(), value.length_per_key(), plain(value.values())
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, Inner):
        return Inner, plain(vars(value))
    if isinstance(value, (list, tuple)):
        return type(value), [plain(part) for part in value]
    return value


@contextmanager
def opened(balancer: BatchBalancer) -> Iterator[BatchBalancer]:
    group: Any = dist.new_group()
    balancer.attach_to_process_group(group, CPU)
    try:
        yield balancer
    finally:
        balancer.close()


def balanced(balancer: BatchBalancer, batch: Any) -> Any:
    return balancer.finish(batch, balancer.start(batch))


# Samples of each rank, by name: as many on each, uneven, nothing on one, nothing anywhere.
COUNTS = {
    2: {"even": [6, 6], "uneven": [7, 3], "nothing on one": [0, 5], "nothing": [0, 0]},
    3: {"uneven": [9, 2, 4]},
}


def samples_of(counts: list[int], rank: int) -> list[int]:
    begin = sum(counts[:rank])
    return list(range(begin, begin + counts[rank]))


def every_kind(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Balances batches of every kind, two in flight at a time, both ways.

    Returns:
        For each case: the numbers of the samples that this rank has, whether all else belongs to these numbers, what
        the ways agree on, and the report.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, counts in COUNTS[world_size].items():
        ways = []
        for one_way in (BatchBalancer(), BatchBalancer(exchange="all_gather")):
            with opened(one_way) as balancer:
                batch = batch_of(samples_of(counts, rank))
                before = plain(batch)
                first, second = balancer.start(batch), balancer.start(batch)
                results = [balancer.finish(batch, first), balancer.finish(batch, second), balanced(balancer, batch)]
                assert plain(batch) == before, "the batch that came was changed"
                assert plain(results[0]) == plain(results[1]) == plain(results[2])
                ways.append((results[0], balancer.report))
        (one, report), (other, _) = ways
        numbers = one["number"].tolist()
        found[name] = {
            "numbers": numbers,
            "right": plain(one) == plain(batch_of(numbers)),
            "alike": plain(one) == plain(other),
            "report": report,
        }
    return found


def padded(rank: int, world_size: int) -> dict[str, Any]:
    """Six rows on each rank, of which 4 and 6 are samples; the padding has numbers of its own."""
    real = [4, 6][rank]
    samples = [[0, 1, 2, 3, 900, 901], [10, 11, 12, 13, 14, 15]][rank]
    found = {}
    ways: dict[str, Any] = {"attribute": "real", "function": lambda batch: batch["real"]}
    for name, says in ways.items():
        batch = {**batch_of(samples), "real": real}
        with opened(BatchBalancer(num_samples=says)) as balancer:
            result = balanced(balancer, batch)
        numbers = result["number"].tolist()
        found[name] = numbers
        assert plain(result) == {**plain(batch_of(numbers)), "real": real}
    return found


def error_of(balancer: BatchBalancer, batch: Any, error: Exception | None = None) -> str:
    try:
        balancer.finish(batch, balancer.start(batch, error))
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


def faults(rank: int, world_size: int) -> dict[str, str]:
    """What each rank raises where rank 1 has a bad batch; behind each a good one is balanced."""
    bad = rank == 1
    good = batch_of(samples_of([3, 3], rank))
    found = {}

    def workload(value: Any) -> Callable[[Any], Any]:
        def of(batch: Any) -> Any:
            costs = batch["number"].float()
            return value(costs) if bad and not batch.get("good") else costs

        return of

    cases: dict[str, tuple[BatchBalancer, Any, Exception | None]] = {
        "negative": (BatchBalancer(workload(lambda costs: costs - 5)), good, None),
        "nan": (BatchBalancer(workload(lambda costs: costs * torch.nan)), good, None),
        "too short": (BatchBalancer(workload(lambda costs: costs[1:])), good, None),
        "no tensor": (BatchBalancer(workload(lambda costs: 3)), good, None),
        "own error": (BatchBalancer(workload(lambda costs: vars(costs)["nothing"])), good, None),
        "rows differ": (BatchBalancer(), {**good, "extra": torch.zeros(2 if bad else 3)}, None),
        "form differs": (BatchBalancer(), {**good, "extra": torch.zeros(3, 2 if bad else 1)}, None),
        "keys differ": (BatchBalancer(), {**good, **({"more": jagged([0, 1, 2])} if bad else {})}, None),
        "not moved": (BatchBalancer(), good, InputError("not moved") if bad else None),
        "list": (BatchBalancer(), {**good, "names": ["x", "y", "z"]}, None),
        "complex": (BatchBalancer(workload(lambda costs: costs + 1j)), good, None),
        "no such name": (BatchBalancer(num_samples="real"), good if bad else {**good, "real": 3}, None),
        "no number": (
            BatchBalancer(num_samples=cast("Any", lambda batch: 2.5 if bad and not batch.get("good") else 3)),
            good,
            None,
        ),
        "nothing to keep": (
            BatchBalancer(local_parts=["batch['stats']"]),
            good if bad else {**good, "stats": "kept"},
            None,
        ),
        "too many": (BatchBalancer(num_samples=lambda batch: 9 if bad and not batch.get("good") else 3), good, None),
    }
    for name, (balancer, batch, error) in cases.items():
        with opened(balancer):
            fine = {**good, "good": True, "real": 3, "stats": "kept"}
            assert error_of(balancer, fine) == "no error"
            found[name] = error_of(balancer, batch, error)
            assert error_of(balancer, fine) == "no error"
    others: dict[str, dict[str, Any]] = {
        "exchange": {"exchange": "all_gather"},
        "local_parts": {"local_parts": ["batch.x"]},
    }
    for name, arguments in others.items():
        try:
            with opened(BatchBalancer(**(arguments if bad else {}))):
                found[f"other {name}"] = "no error"
        except Exception as problem:
            found[f"other {name}"] = f"{type(problem).__name__}: {problem}"
    return found
