"""The text example: bytes and the bytes that follow them, and the bigrams that the model is compared with."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import yaml

from examples.llm_text.bigram import bigram_cross_entropy
from examples.llm_text.data import PythonText, Windows, documents

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "llm_text" / "1f1b.yaml"


def test_the_text_is_the_documentation_and_the_standard_library_in_a_fixed_order() -> None:
    found = documents()
    assert found == documents()
    assert sum(map(len, found)) > 10**6
    joined = b"".join(found)
    assert b"def heappush(" in joined
    assert b'The "assert" statement' in joined


def test_a_label_is_the_byte_that_follows() -> None:
    windows = Windows(torch.arange(100, dtype=torch.uint8), length=8, count=5, seed=3)
    assert len(windows) == 5
    for row in (windows[index] for index in range(5)):
        assert row["input_ids"].dtype == torch.int64
        assert row["input_ids"].shape == (8,)
        assert torch.equal(row["labels"], row["input_ids"] + 1)


def test_no_document_is_both_trained_on_and_validated_with() -> None:
    data = PythonText(batch_size=4, length=32, steps=3, validation_rows=8)
    data.setup("fit")
    training, validation = bytes(data.training_text.tolist()), bytes(data.validation_text.tolist())
    found = documents()
    longest = max(found[::10], key=len)
    assert longest in validation
    assert longest not in training
    assert [len(loader) for loader in (data.train_dataloader(), data.val_dataloader())] == [3, 2]


def test_bigrams_know_the_next_byte_of_a_cycle_and_nothing_of_new_pairs() -> None:
    cycle = torch.tensor([1, 2, 3] * 4000, dtype=torch.uint8)
    assert bigram_cross_entropy(cycle, cycle) < 0.1
    new = torch.tensor([7, 8] * 10, dtype=torch.uint8)
    assert math.isclose(bigram_cross_entropy(cycle, new), math.log(256), rel_tol=1e-6)


def test_the_model_is_as_long_as_its_rows_and_the_micro_batches_divide_them() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    model, data = config["model"]["init_args"]["config"], config["data"]["init_args"]
    assert data["length"] <= model["max_position_embeddings"]
    assert data["batch_size"] % config["trainer"]["strategy"]["init_args"]["num_microbatches"] == 0
