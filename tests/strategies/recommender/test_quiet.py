from __future__ import annotations

import logging
import warnings

import pytest

from lightning_pipe.strategies.recommender.quiet import quiet_torchrec

SAID = "Sharding spec not found for network.bags.people"


def test_a_line_of_torchrecs_is_kept_back_and_others_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    quiet_torchrec()
    logging.warning(SAID)
    logging.warning("Sharding spec of mine")
    logging.getLogger("mine").warning(SAID)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("root", "Sharding spec of mine"),
        ("mine", SAID),
    ]


def test_a_warning_is_kept_back_where_pytorch_says_it_and_heard_elsewhere() -> None:
    text = "fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel was not registered to the key"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        quiet_torchrec()
        warnings.warn_explicit(text, UserWarning, "graph.py", 979, module="torch.autograd.graph")
        warnings.warn_explicit(text, UserWarning, "mine.py", 1, module="mine")
        warnings.warn_explicit("another", UserWarning, "graph.py", 979, module="torch.autograd.graph")
    assert [(str(warning.message), warning.filename) for warning in heard] == [
        (text, "mine.py"),
        ("another", "graph.py"),
    ]
