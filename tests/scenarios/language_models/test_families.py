"""Every causal LM of transformers is trained in stages as by a plain loop, or refused; docs/families.md says which."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from lightning_pipe.llm.parallel.sdpa_intercept import CONTEXT_PARALLEL_FAMILIES as ON_PARTS
from tests.distributed import run_ranks
from tests.scenarios.language_models.families import (
    CHUNK,
    COUNT,
    FAMILIES,
    SCHEDULES,
    WITHIN,
    Found,
    Noting,
    batches,
    by_a_plain_loop,
    config_of,
    losses_of,
    outcome,
    tables,
    trained,
)
from tests.strategies.llm_cases import fit, llm

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
# The families and the reasons depend on the releases.
DEFAULT = torch.__version__.startswith("2.14.")
# A capped logit, a nested head, routers that need values, an embedding that every layer needs.
OFTEN = ("recurrent_gemma", "bert", "jetmoe", "zamba2")


def test_families_of_each_kind_are_equal_or_refused() -> None:
    found = trained(OFTEN)
    results = {family: [outcome(one, schedule) for schedule in SCHEDULES] for family, one in found.items()}
    assert (
        results.pop("zamba2")
        == ["layer model.layers.0 receives original_hidden_states, which later stages cannot compute"] * 2
    )
    first, second = results.pop("bert")
    assert first == ""
    assert second.startswith("cls.predictions.bias and cls.predictions.decoder.bias of stage 3 are one parameter")
    assert not [family for family, reasons in results.items() if any(reasons)]


def check_page(found: dict[str, Found]) -> None:
    results = [outcome(one, schedule) for one in found.values() for schedule in SCHEDULES]
    assert not [one for one in results if one.startswith(("DIFFERENT", "FAILED"))]
    page = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->")[2]
    _, equal, *_ = page.strip().split("\n\n")
    _, also_equal, *rows = tables(found).split("\n\n")
    assert set(re.findall(r"`[^`]+`", also_equal)) <= set(re.findall(r"`[^`]+`", equal))
    lines = [line for table in rows for line in table.splitlines()]
    assert [line for line in lines if line not in page.splitlines()] == []


@pytest.mark.exhaustive
@pytest.mark.skipif(not DEFAULT, reason="the page is about the default stack")
def test_families_far_apart_in_the_alphabet_are_as_the_page_says() -> None:
    check_page(trained(FAMILIES[::7]))


@pytest.mark.long
@pytest.mark.skipif(not DEFAULT, reason="the page is about the default stack")
def test_the_tables_of_the_page_are_those_of_training() -> None:
    found = trained()
    assert found.keys() == set(FAMILIES)
    check_page(found)
    page = PAGE.read_text(encoding="utf-8")
    assert [table for table in tables(found).split("\n\n") if table not in page] == []


def test_the_page_names_every_family_once() -> None:
    if transformers.__version__ not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page is about another release of transformers")
    body = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->")[2]
    named = re.findall(
        r"`([^`]+)`", "\n".join(re.sub(r"^(\| `[^`]+` \|).*", r"\1", line) for line in body.splitlines())
    )
    assert sorted(named) == sorted(FAMILIES)


# Parts of sequences


def on_parts(rank: int, world: int, families: list[str]) -> dict[str, list[list[float] | str]]:
    """Losses of a plain loop, and with sequences cut over the ranks, by either method."""
    found: dict[str, list[list[float] | str]] = {}
    for family in families:
        known = AutoConfig.for_model(family).to_dict()
        whole = {name: None for name in ("sliding_window", "attention_chunk_size") if isinstance(known.get(name), int)}
        config = config_of(family, **whole)
        found[family] = [losses_of(partial(by_a_plain_loop, config))]
        found[family] += [losses_of(partial(on_part, config, method)) for method in ("ulysses", "ring")]
    return found


def on_part(config: Any, method: str) -> list[float]:
    module = Noting(config)
    fit(module, llm("1f1b", COUNT, pp=1, cp=2, cp_method=method), batches())
    return module.losses


@pytest.mark.parametrize(
    "every", [pytest.param(9, marks=pytest.mark.exhaustive), pytest.param(1, marks=pytest.mark.long)]
)
def test_families_are_equal_with_parts_of_sequences_or_refused(every: int) -> None:
    families = sorted(ON_PARTS)[::every]
    for begin in range(0, len(families), CHUNK):
        one, other = run_ranks(on_parts, 2, families[begin : begin + CHUNK])
        for family, (expected, *found) in one.items():
            for losses, same in zip(found, other[family][1:], strict=True):
                assert losses == same, family
                if isinstance(losses, str):
                    assert losses.startswith("SetupError: "), family
                else:
                    assert losses == pytest.approx(expected, abs=WITHIN), family


@pytest.mark.parametrize("family", ["bart", "falcon_h1"])
def test_a_family_that_would_mix_or_count_tokens_of_its_part_alone_is_refused(family: str) -> None:
    for rank in run_ranks(on_parts, 2, [family]):
        for message in rank[family][1:]:
            assert f"{family!r} models are not known to train on parts of sequences" in str(message)


# Router losses


def test_the_router_loss_of_all_layers_is_transformers_own() -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    found = trained(("qwen3_moe",), **changes)["qwen3_moe"]
    assert [outcome(found, schedule) for schedule in SCHEDULES] == ["", ""]
    without = by_a_plain_loop(config_of("qwen3_moe"))
    assert abs(found.plain[0] - without[0]) > 100 * WITHIN  # type: ignore[operator]
