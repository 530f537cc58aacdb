"""What the strategies have in common; missing ranks are in tests/faults, random streams in test_pipeline."""

from __future__ import annotations

import warnings

import pytest

from tests.strategies.cases import trainer


@pytest.mark.parametrize(
    ("shared", "restarts", "warns"), [("True", "3", True), ("True", "0", False), ("False", "3", False)]
)
def test_restarts_that_would_not_find_each_other_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, shared: str, restarts: str, warns: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    strategy = trainer("pipeline").strategy
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy._warn_of_stale_addresses()  # type: ignore[attr-defined]
    said = [str(one.message) for one in caught]
    assert len(said) == warns
    assert all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in one for one in said)
