"""Comparison of the losses and values that two ways have saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Compared", "Rule", "compare"]


@dataclass(frozen=True)
class Rule:
    """Ways that must have the values of another way.

    Attributes:
        reference: way to compare with.
        compared_ways: ways that are compared.
        how: "equal" to the bit; "close", for other arithmetic; "different", for a check that an option has an effect.
        file: name of the file of *compared_ways*.
        reference_file: name of the file of *reference* (default: that of *compared_ways*).
        terms: number of terms of the largest sum in a step, for the tolerance of "close".
        within: tolerance of "close" itself, relative to the largest value of a tensor (default: that of *terms*).
        part: True if *compared_ways* hold a part of the reference's values, without the states of optimizers, as stages
            do.
    """

    reference: str
    compared_ways: tuple[str, ...]
    how: Literal["equal", "close", "different"] = "equal"
    file: str = "values.pt"
    reference_file: str = ""
    terms: int = 0
    within: float = 0.0
    part: bool = False


@dataclass(frozen=True)
class Compared:
    """Result of one comparison.

    Attributes:
        ways: names of the ways, with the rank if it is not the first.
        expected: expectation in words, with the tolerance.
        right: True if it is met.
        difference: largest difference in words, or the reason why there is none.
    """

    ways: str
    expected: str
    right: bool
    difference: str


def compare(folder: Path, rule: Rule) -> Iterator[Compared]:
    """Compare all ways of *rule* on all ranks. A missing file or way is a difference."""
    files = [folder / rule.file, *sorted(folder.glob(f"{rule.file}.rank*"))]
    for file in files:
        suffix = file.name.removeprefix(rule.file)
        reference_path = folder / f"{rule.reference_file or rule.file}{suffix}"
        missing = [path.name for path in (file, reference_path) if not path.exists()]
        results, references = (
            {} if missing else torch.load(path, weights_only=True) for path in (file, reference_path)
        )
        for way in rule.compared_ways:
            ways = (
                f"{way} / {rule.reference}{f' of {rule.reference_file}' if rule.reference_file else ''}"
                f"{suffix.replace('.', ', ')}"
            )
            if missing:
                yield Compared(ways, rule.how, False, f"no file {', '.join(missing)}")
            else:
                yield _compared(ways, rule, references.get(rule.reference), results.get(way))


def tolerance(steps: int, terms: int) -> float:
    """Bound of the difference between two orders of the same sums, relative to the largest value of a tensor.

    A float32 sum of n terms has an error of at most n * 2**-24 times the sum of their magnitudes (Higham, Accuracy and
    Stability of Numerical Algorithms, 4.2). Each step adds an error of this size.
    """
    return steps * terms * 2.0**-24


def _compared(ways: str, rule: Rule, reference: dict[str, Any] | None, result: dict[str, Any] | None) -> Compared:
    for saved, name in ((reference, "the reference"), (result, "the way")):
        if saved is None or "error" in saved:
            reason = "was not saved" if saved is None else f"failed: {saved['error']}"
            return Compared(ways, rule.how, False, f"{name} {reason}")
    assert reference is not None and result is not None
    terms = rule.terms
    expected: str = {"equal": "equal to the bit", "different": "different losses"}.get(rule.how, "")
    if rule.how == "equal" and (kernels := sorted({*reference["kernels"], *result["kernels"]})):
        # The order of these sums may change from run to run.
        terms = terms or 1024
        expected = f"close, since not deterministic: {'; '.join(kernels)}"
    allowed = None
    if rule.how != "equal" or expected.startswith("close"):
        allowed = rule.within or tolerance(len(reference["losses"]), terms)
    if allowed is not None and rule.how != "different":
        expected = f"{expected or 'close'}, relative difference at most {allowed:.1e}"
    values = {key: value for key, value in result["values"].items() if not (rule.part and key.startswith("state "))}
    reference_names = reference["values"].keys()
    if not (values.keys() <= reference_names if rule.part else values.keys() == reference_names):
        names = sorted(values.keys() - reference_names or values.keys() ^ reference_names)
        return Compared(ways, expected, False, f"other tensors: {', '.join(names[:4])}")
    pairs = {
        "losses": (reference["losses"], result["losses"]),
        **{k: (reference["values"][k], values[k]) for k in values},
    }
    if len(pairs) < 2:
        return Compared(ways, expected, False, "no values")
    if broken := [key for key, pair in pairs.items() if not all(torch.isfinite(each).all() for each in pair)]:
        return Compared(ways, expected, False, f"not finite: {', '.join(broken[:4])}")
    if broken := [key for key, pair in pairs.items() if pair[0].shape != pair[1].shape]:
        return Compared(ways, expected, False, f"other shapes: {', '.join(broken[:4])}")
    if rule.how == "different":
        same = torch.equal(*pairs["losses"])
        return Compared(ways, expected, not same, "equal losses" if same else "different losses")
    worst, name, absolute = max((_difference(*pair), key, _absolute(*pair)) for key, pair in pairs.items())
    equal = all(torch.equal(*pair) for pair in pairs.values())
    right = equal if allowed is None else worst <= allowed
    found_text = "equal to the bit" if equal else f"{name}: absolute {absolute:.1e}, relative {worst:.1e}"
    return Compared(ways, expected, right, f"{found_text}, {len(pairs)} tensors")


def _absolute(reference: Tensor, result: Tensor) -> float:
    return float((reference.double() - result.double()).abs().max()) if reference.numel() else 0.0


def _difference(reference: Tensor, result: Tensor) -> float:
    """Largest difference, relative to the largest magnitude in the tensor."""
    absolute = _absolute(reference, result)
    return absolute / max(float(reference.double().abs().max()), 2.0**-126) if absolute else 0.0
