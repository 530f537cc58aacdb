"""One page about the results: environment, parts, differences and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.gpu.parts import Part

__all__ = ["report"]


def report(
    parts: Sequence[Part],
    results: Mapping[str, dict[str, Any]],
    about: Mapping[str, Any],
    dry: bool,
    left: Sequence[str],
) -> str:
    """Text of ``report.md``.

    Args:
        parts: all parts, in their order.
        results: results by the name of the part.
        about: versions and commit.
        dry: True for a dry run.
        left: names of parts that had no time.
    """
    lines = ["# Results of make gpu", ""]
    if dry:
        lines += ["**A dry run on the CPU. Nothing here is about a GPU.**", ""]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines += [f"Commit {about['commit'][:12]}, code {about['code']}. {versions}.", "", _counts(parts, results), ""]
    lines += ["| part | result | seconds | what it shows |", "| --- | --- | --- | --- |"]
    for part in parts:
        result = results.get(part.name)
        state = "not run, no time left" if part.name in left else "not run"
        if result is not None:
            state = result["status"] + (f": {_cell(result['why'])}" if result["status"] == "not possible" else "")
        lines.append(f"| {part.name} | {state} | {result['seconds'] if result else ''} | {_cell(part.shows)} |")
    for part in parts:
        if (result := results.get(part.name)) is not None and result["status"] in ("differed", "failed"):
            lines += ["", f"## {part.name} {result['status']}", "", *_wrong(result)]
    for title, head, rows in (
        ("Comparisons", ("ways", "expected", "found"), _comparisons(parts, results)),
        ("Figures", ("part", "figure", "value", "spread", "target"), _figures(parts, results, dry)),
        ("Peak of the caching allocator", ("part", "way", "MB"), _peaks(parts, results)),
    ):
        if rows:
            lines += ["", f"## {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
            lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _counts(parts: Sequence[Part], results: Mapping[str, dict[str, Any]]) -> str:
    states = [results[part.name]["status"] if part.name in results else "not run" for part in parts]
    names = ("passed", "differed", "failed", "not possible", "not run")
    return ", ".join(f"{states.count(name)} {name}" for name in names if name in states) + f" of {len(parts)} parts."


def _wrong(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for comparison in result.get("compared", ()):
        if not comparison["right"]:
            lines.append(f"- {comparison['ways']}: expected {comparison['expected']}, found {comparison['difference']}")
    if not lines:
        lines = ["```text", *result["why"].splitlines(), "```"]
    return lines + (["", f"Look at: {result['look_at']}"] if result["look_at"] else [])


def _comparisons(parts: Sequence[Part], results: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """One row for the right comparisons of a part with one expectation and result."""
    rows = []
    for part in parts:
        groups: dict[tuple[str, str], list[str]] = {}
        for comparison in results.get(part.name, {}).get("compared", ()):
            if comparison["right"]:
                groups.setdefault((comparison["expected"], comparison["difference"]), []).append(comparison["ways"])
        rows += [[f"{part.name}: {'; '.join(ways)}", *group] for group, ways in groups.items()]
    return rows


def _figures(parts: Sequence[Part], results: Mapping[str, dict[str, Any]], dry: bool) -> list[list[str]]:
    rows = []
    for part in parts:
        for figure in results.get(part.name, {}).get("figures", ()):
            low, high = figure["spread"]
            met = "" if dry else {True: ", met", False: ", missed"}.get(figure["met"], "")
            rows.append(
                [
                    part.name,
                    figure["name"],
                    f"{figure['value']:.3g} {figure['unit']}",
                    f"{low:.3g} .. {high:.3g}",
                    f"{figure['target'] or ''}{met}",
                ]
            )
    return rows


def _peaks(parts: Sequence[Part], results: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    peaks_by_part = [(part.name, results.get(part.name, {}).get("peaks", {})) for part in parts]
    return [[name, way, f"{peak / 1e6:.2f}"] for name, peaks in peaks_by_part for way, peak in peaks.items()]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
