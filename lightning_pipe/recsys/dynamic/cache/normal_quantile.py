"""Quantile function of the standard normal distribution, made only of operations that IEEE 754 rounds exactly.

Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37 (1988), PPND16:
relative accuracy about 1e-16. The logarithm is computed here by a series, for the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

# Coefficients, highest power first, for |p - 0.5| <= 0.425, then for r = sqrt(-log(min(p, 1 - p))) <= 5 and for r > 5.
_MIDDLE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852545925, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_OUTER = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)  # fmt: skip
_OUTMOST = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
     0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)  # fmt: skip

_LOG_2 = 0.6931471805599453
_HALF_ROOT = 0.7071067811865476


def normal_quantile(probabilities: Doubles) -> Doubles:
    """Quantiles of the standard normal distribution at *probabilities*, which are in (0, 1) and of any shape."""
    centred = probabilities - 0.5
    square = 0.180625 - centred * centred
    # Correct for |p - 0.5| <= 0.425; finite elsewhere, and replaced below.
    result = centred * _ratio(_MIDDLE, square)
    outside = np.flatnonzero(square < 0)
    if outside.size:
        flat, place = probabilities.reshape(-1), centred.reshape(-1)[outside]
        part = flat[outside]
        result.reshape(-1)[outside] = np.copysign(_tail(np.where(place < 0, part, 1.0 - part)), place)
    return result


def _tail(probabilities: Doubles) -> Doubles:
    """Negated quantiles of probabilities up to 0.075."""
    r = np.sqrt(-_log(probabilities))
    values = _ratio(_OUTER, r - 1.6)
    far = np.flatnonzero(r > 5.0)
    if far.size:
        values[far] = _ratio(_OUTMOST, r[far] - 5.0)
    return values


def _log(x: Doubles) -> Doubles:
    """Natural logarithm: 2 artanh((m - 1) / (m + 1)) + e log 2 with x = m 2^e and m near 1."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < _HALF_ROOT
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial([1.0 / odd for odd in range(23, 0, -2)], ratio * ratio)
    return 2.0 * ratio * series + (exponent - low) * _LOG_2


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: Doubles) -> Doubles:
    above, below = coefficients
    return _polynomial(above, x) / _polynomial(below, x)


def _polynomial(coefficients: Sequence[float], x: Doubles) -> Doubles:
    """Horner's rule, highest power first."""
    value = np.full_like(x, coefficients[0])
    for one in coefficients[1:]:
        value *= x
        value += one
    return value
