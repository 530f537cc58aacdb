from __future__ import annotations

import logging

import pytest

from lightning_pipe.strategies.recommender.warning_filters import filter_torchrec_warnings

SAID = "Sharding spec not found for network.bags.people"


def test_a_line_of_torchrecs_is_kept_back_and_others_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    filter_torchrec_warnings()
    logging.warning(SAID)
    logging.warning("Sharding spec of mine")
    logging.getLogger("mine").warning(SAID)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("root", "Sharding spec of mine"),
        ("mine", SAID),
    ]
