"""Bounds for comparisons with another implementation, from how rounding grows in the computation itself.

Two plans of this package run the same kernels and agree to the bit on any CPU. An unsharded module, another library or
one process in place of two runs other kernels, or the same kernels in another order; kernels are also chosen by CPU.
Both results are correct, and they differ by rounding, which the computation may amplify: batch normalization and
Adagrad divide by what may be tiny. A constant that one machine meets says nothing about the next, so the bound is
measured, by Monte Carlo arithmetic (Parker, 1997):

- To first order, rounding moves a result by the sum of J_k d_k over all operations k: d_k is the relative rounding
  error of operation k and J_k the derivative of the result by it.
- `Perturbed` runs the computation with each result of an operation moved to one of its two neighbors at random, so
  that |d_k| is between eps / 2 and eps (eps: distance from 1 to the next number, twice the error of one correct
  rounding). The final result moves by a random number with a standard deviation of at least eps |J| / 2, where |J| is
  the Euclidean norm of all J_k. The *spread* estimates it: the largest move over the elements of a tensor and over
  `SEEDS` runs.
- In a correct implementation |d_k| <= c eps, where c = 1/2 for one operation and about sqrt(n) / 2 for a sum of n
  terms, since roundings in a sum hardly correlate (Higham and Mary, 2019) and each term was perturbed as well. c = 1
  covers four terms in each lane of a vector register, which is more than the tests' sums have. Both implementations
  round, which gives a factor of sqrt(2). By Hoeffding's inequality, a sum of such errors exceeds six standard
  deviations with a probability below 2 exp(-18) = 3e-8. Together 2 * sqrt(2) * 6 = 17 spreads, of which the maximum
  over elements and runs makes fewer: `SPREADS` is 16.

First order holds while rounding stays small, which `Reference` checks: a bound above `AT_MOST` of the values would
decide nothing, and is an error of the test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SEEDS = 4
SPREADS = 16.0
AT_MOST = 0.01

# Operations that move, select, fill or draw values round nothing.
_EXACT = frozenset(
    f"aten::{name}"
    for group in (
        "_to_copy cat clone constant_pad_nd copy copy_ gather index index_select lift_fresh masked_select stack",
        "max maximum min minimum relu threshold_backward neg masked_fill masked_fill_ where tril triu sort topk",
        "arange empty empty_like empty_strided fill fill_ full full_like new_empty new_full new_ones new_zeros ones",
        "ones_like scalar_tensor zero_ zeros zeros_like bernoulli_ normal_ rand randn uniform_",
    )
    for name in group.split()
)


class Perturbed(TorchDispatchMode):
    """Mode in which each floating-point result of PyTorch's operations is off by one in its last place, up or down.

    It holds for the forward pass, the backward pass and optimizers on the thread that enters it. Integers in floating
    point (steps, counts, masks) stay exact.

    Args:
        seed: of the directions.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = _views(func)
        if views is not None:
            results = result if isinstance(result, (tuple, list)) else (result,)
            # One declared result may be a list of tensors.
            declared = views if len(views) == len(results) else len(results) * views
            for value, is_view in zip(results, declared, strict=False):
                # A view shows values that were perturbed when they were computed.
                if not is_view and isinstance(value, Tensor) and value.dtype in _INTEGERS:
                    self._perturb(value)
        return result

    def _perturb(self, value: Tensor) -> None:
        # As integers, the neighbors of a floating-point number are one more and one less.
        bits = _INTEGERS[value.dtype]
        moves = _moves(bits, max(2**18, 2 ** (2 * value.numel()).bit_length()))
        first = self._random.randrange(len(moves) - value.numel() + 1)
        move = moves[first : first + value.numel()].view(value.shape)
        value.view(bits).addcmul_(move, value != value.round())


_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


@cache
def _moves(bits: torch.dtype, count: int) -> Tensor:
    """Ups and downs, of which each perturbed value takes a run that begins somewhere."""
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(0), dtype=bits).mul_(2).sub_(1)


@cache
def _views(func: Any) -> tuple[bool, ...] | None:
    """Of each result of an operation, whether it is a view; None for an operation that rounds nothing."""
    schema = func._schema
    if not schema.name.startswith("aten::") or schema.name in _EXACT:
        return None
    return tuple(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value).detach().to(torch.float64, copy=True) for name, value in values.items()}


def _size(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max()) if one.numel() else 0.0


class Reference:
    """Results of one implementation, and the largest difference allowed to another one.

    One perturbed run is measured at once, the others of `SEEDS` when a difference is larger than the runs so far
    allow: the bound is a maximum, so that what few runs allow all do. Among ranks, which may all take part in a run,
    all are measured at once.

    Attributes:
        values: tensors by name, in double precision.
    """

    def __init__(self, values: Mapping[str, Tensor], within: Mapping[str, float]) -> None:
        self.values = dict(values)
        self._within = dict(within)
        self._run: Callable[[], Mapping[str, Any]] | None = None
        self._seeds = iter(range(0))

    @classmethod
    def exactly(cls, values: Mapping[str, Any]) -> Reference:
        """Results of the same kernels in the same order, which another run must have to the bit."""
        return cls(_tensors(values), dict.fromkeys(values, 0.0))

    @classmethod
    def of(cls, run: Callable[[], Mapping[str, Any]]) -> Reference:
        """Run an implementation as it is and up to `SEEDS` times perturbed.

        Args:
            run: computes all of it from the same seeds, whenever it is called; returns tensors, numbers or lists of
                numbers by name.
        """
        plain = _tensors(run())
        reference = cls(plain, dict.fromkeys(plain, 0.0))
        reference._run, reference._seeds = run, iter(range(SEEDS))
        reference._measure_once()
        if dist.is_initialized() and dist.get_world_size() > 1:
            reference._measure_all()
        return reference

    @property
    def within(self) -> dict[str, float]:
        """Largest absolute difference of each result."""
        self._measure_all()
        return dict(self._within)

    def bounds(self, name: str) -> Iterator[float]:
        """Largest difference of one result, after one perturbed run and after each further one."""
        yield self._within[name]
        while self._measure_once():
            yield self._within[name]

    def differences(self, found: Mapping[str, Any], partly: bool = False) -> list[str]:
        """Names of results that are missing or too far from the reference, each with distance and bound.

        Args:
            found: results of the other implementation; those that the reference does not have are ignored.
            partly: whether results that were not found are ignored, too.
        """
        distances = {
            name: _distance(_tensors({name: found[name]})[name], expected)
            for name, expected in self.values.items()
            if name in found
        }

        def too_far(name: str) -> bool:
            # A distance that is no number is a difference as well.
            return not distances[name] <= self._within[name]

        while any(map(too_far, distances)) and self._measure_once():
            pass
        problems = []
        for name in self.values:
            if name not in distances:
                problems += [] if partly else [f"{name}: missing"]
            elif too_far(name):
                allowed = f"at most {self._within[name]:.1e} of difference"
                problems.append(f"{name}: expected {allowed}, got {distances[name]:.1e}")
        return problems

    def _measure_all(self) -> None:
        while self._measure_once():
            pass

    def _measure_once(self) -> bool:
        """One more perturbed run; whether there was one to be had."""
        seed = next(self._seeds, None)
        if seed is None or self._run is None:
            return False
        with Perturbed(seed):
            perturbed = _tensors(self._run())
        for name, value in self.values.items():
            size = _size(value)
            # At least one last place: a result may have been rounded to the same number in each run.
            bound = SPREADS * _distance(perturbed[name], value) + torch.finfo(torch.float32).eps * size
            assert bound <= AT_MOST * size, (
                f"expected rounding to move {name} by at most {AT_MOST:g} of its size {size:.1e}, got a bound of "
                f"{bound:.1e}: compare fewer steps, or a model that amplifies less"
            )
            self._within[name] = max(self._within[name], bound)
        return True

    def __getstate__(self) -> dict[str, Any]:
        # What a run was made of stays where it is.
        self._measure_all()
        return {**self.__dict__, "_run": None, "_seeds": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _seeds=iter(range(0)))
