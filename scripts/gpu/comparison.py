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
        others: ways that are compared.
        how: "equal" to the bit; "close", for other arithmetic; "different", for a check that an option has an effect.
        file: name of the file of *others*.
        of: name of the file of *reference* (default: that of *others*).
        terms: number of terms of the largest sum in a step, for the tolerance of "close".
        part: True if *others* hold a part of the reference's values, without the states of optimizers, as stages do.
    """

    reference: str
    others: tuple[str, ...]
    how: Literal["equal", "close", "different"] = "equal"
    file: str = "values.pt"
    of: str = ""
    terms: int = 0
    part: bool = False


@dataclass(frozen=True)
class Compared:
    """Result of one comparison.

    Attributes:
        what: the ways, with the rank if it is not the first.
        expected: expectation in words, with the tolerance.
        right: True if it is met.
        found: largest difference in words, or the reason why there is none.
    """

    what: str
    expected: str
    right: bool
    found: str


def compare(folder: Path, rule: Rule) -> Iterator[Compared]:
    """Compare all ways of *rule* on all ranks. A missing file or way is a difference."""
    files = [folder / rule.file, *sorted(folder.glob(f"{rule.file}.rank*"))]
    for file in files:
        suffix = file.name.removeprefix(rule.file)
        of = folder / f"{rule.of or rule.file}{suffix}"
        missing = [one.name for one in (file, of) if not one.exists()]
        results, references = ({} if missing else torch.load(one, weights_only=True) for one in (file, of))
        for other in rule.others:
            what = f"{other} / {rule.reference}{f' of {rule.of}' if rule.of else ''}{suffix.replace('.', ', ')}"
            if missing:
                yield Compared(what, rule.how, False, f"no file {', '.join(missing)}")
            else:
                yield _compared(what, rule, references.get(rule.reference), results.get(other))


def tolerance(steps: int, terms: int) -> float:
    """Bound of the difference between two orders of the same sums, relative to the largest value of a tensor.

    A float32 sum of n terms has an error of at most n * 2**-24 times the sum of their magnitudes (Higham, Accuracy and
    Stability of Numerical Algorithms, 4.2). Each step adds an error of this size.
    """
    return steps * terms * 2.0**-24


def _compared(what: str, rule: Rule, one: dict[str, Any] | None, other: dict[str, Any] | None) -> Compared:
    for found, name in ((one, "the reference"), (other, "the way")):
        if found is None or "error" in found:
            reason = "was not saved" if found is None else f"failed: {found['error']}"
            return Compared(what, rule.how, False, f"{name} {reason}")
    assert one is not None and other is not None
    terms = rule.terms
    expected: str = {"equal": "equal to the bit", "different": "different losses"}.get(rule.how, "")
    if rule.how == "equal" and (kernels := sorted({*one["kernels"], *other["kernels"]})):
        # The order of these sums may change from run to run.
        terms = terms or 1024
        expected = f"close, since not deterministic: {'; '.join(kernels)}"
    allowed = None if rule.how == "equal" and not expected.startswith("close") else tolerance(len(one["losses"]), terms)
    if allowed is not None and rule.how != "different":
        expected = f"{expected or 'close'}, relative difference at most {allowed:.1e}"
    values = {key: value for key, value in other["values"].items() if not (rule.part and key.startswith("state "))}
    known = one["values"].keys()
    if not (values.keys() <= known if rule.part else values.keys() == known):
        names = sorted(values.keys() - known or values.keys() ^ known)
        return Compared(what, expected, False, f"other tensors: {', '.join(names[:4])}")
    pairs = {"losses": (one["losses"], other["losses"]), **{k: (one["values"][k], values[k]) for k in values}}
    if len(pairs) < 2:
        return Compared(what, expected, False, "no values")
    if broken := [key for key, pair in pairs.items() if not all(torch.isfinite(each).all() for each in pair)]:
        return Compared(what, expected, False, f"not finite: {', '.join(broken[:4])}")
    if broken := [key for key, pair in pairs.items() if pair[0].shape != pair[1].shape]:
        return Compared(what, expected, False, f"other shapes: {', '.join(broken[:4])}")
    if rule.how == "different":
        same = torch.equal(*pairs["losses"])
        return Compared(what, expected, not same, "equal losses" if same else "different losses")
    worst, name, absolute = max((_difference(*pair), key, _absolute(*pair)) for key, pair in pairs.items())
    equal = all(torch.equal(*pair) for pair in pairs.values())
    right = equal if allowed is None else worst <= allowed
    found_text = "equal to the bit" if equal else f"{name}: absolute {absolute:.1e}, relative {worst:.1e}"
    return Compared(what, expected, right, f"{found_text}, {len(pairs)} tensors")


def _absolute(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _difference(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest magnitude in the tensor."""
    absolute = _absolute(one, other)
    return absolute / max(float(one.double().abs().max()), 2.0**-126) if absolute else 0.0
