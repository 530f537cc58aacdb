"""Bytes of tensors that exist, counted once for each storage."""

from __future__ import annotations

import torch

from lightning_pipe.llm.measure.live_bytes import LiveBytes


def test_a_storage_counts_once_from_when_it_is_made_until_it_is_gone() -> None:
    before = torch.zeros(100)
    with LiveBytes() as live:
        made = torch.ones(1000)
        assert live.current == 4000
        view, _ = made.view(10, 100)[2:], before.view(10, 10)
        before += 1
        made.mul_(2)
        assert live.current == 4000
        del made
        assert live.current == 4000
        del view
        assert live.current == 0
        assert live.peak == 4000
        kept = torch.ones(5)
    torch.ones(500)
    assert live.current == 20
    del kept
    assert live.current == 0
