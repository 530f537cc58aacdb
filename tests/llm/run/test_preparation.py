"""Batches become micro-batches of one length, agreed on by all ranks; what one rank finds wrong all refuse."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.microbatches import count_loss_tokens
from lightning_pipe.llm.batches.options import Batching
from lightning_pipe.llm.losses.cross_entropy import shift_labels
from lightning_pipe.llm.run.preparation import BatchPreparation, StepInputs
from lightning_pipe.llm.run.stage_hooks import StageHooks


class Work:
    """An exchange whose answers are there once it is waited for."""

    def __init__(self, gathered: Tensor, rows: Sequence[Sequence[int]]) -> None:
        self.gathered = gathered
        self.rows = rows

    def wait(self) -> None:
        self.gathered.copy_(torch.tensor(self.rows))


class Group:
    """What the other ranks send: ``(1, rows, length, tokens)``, or zeros where one cannot use its batch."""

    def __init__(self, rank: int, others: Mapping[int, Sequence[int]]) -> None:
        self.own = rank
        self.others = others
        self.sent: list[list[int]] = []

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return 1 + len(self.others)

    def gather(self, gathered: Tensor, own: Tensor, group: Any, async_op: bool) -> Work:
        assert group is self
        assert async_op
        (numbers,) = own.tolist()
        self.sent.append(numbers)
        return Work(
            gathered,
            [[*self.others[rank], 0, numbers[-1]] if rank in self.others else numbers for rank in range(self.size())],
        )


@pytest.fixture(autouse=True)
def _ranks_are_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather_single", lambda *args, group, **kw: group.gather(*args, group, **kw))


def inputs_of(micro_batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rest = {key: value for key, value in micro_batch.items() if key not in ("input_ids", "labels")}
    return (micro_batch["input_ids"],), rest


class Hooks(StageHooks):
    def build_model(self) -> nn.Module:
        return nn.Identity()

    def loss_tokens(self, micro_batch: Mapping[str, Any]) -> int:
        return count_loss_tokens(micro_batch["labels"])

    def model_inputs(self, micro_batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs_of(micro_batch)


def make(group: Group, pipelines: Sequence[Sequence[int]] | None = None, **options: Any) -> BatchPreparation:
    """Options of the preparation, or of ``Batching``."""
    own = {name: options.pop(name) for name in ("vocabulary",) if name in options}
    every: Any = group
    return BatchPreparation(Hooks(), Batching(**options), every, pipelines or [list(range(group.size()))], 2, **own)


def prepare(group: Group, batch: Any, **options: Any) -> StepInputs:
    preparation = make(group, **options)
    return preparation.finish(preparation.begin(batch))


def batch(rows: int = 4, length: int = 5) -> dict[str, Tensor]:
    labels = torch.ones(rows, length, dtype=torch.long)
    labels[0, 0] = -100
    return {"input_ids": torch.arange(rows * length).view(rows, length), "labels": labels}


def test_a_batch_becomes_arguments_keywords_and_targets_of_micro_batches() -> None:
    step = prepare(Group(0, {}), batch() | {"factor": torch.rand(4), "scale": 3})
    assert len(step.micro_batches) == 2
    for index, one in enumerate(step.micro_batches):
        (ids,) = one.args
        assert torch.equal(ids, batch()["input_ids"][2 * index : 2 * index + 2])
        assert set(one.kwargs) == {"factor", "scale"}
        assert one.target["input_ids"] is ids
    assert step.tokens == 19
    assert (step.cut.rows, step.cut.padded_rows) == (4, 0)


@pytest.mark.parametrize(("wrong", "place"), [(-1, (1, 4)), (20, (3, 0))])
def test_an_id_outside_of_the_vocabulary_is_refused_with_its_place(wrong: int, place: tuple[int, int]) -> None:
    given = batch()
    prepare(Group(0, {}), given, vocabulary=20)
    given["input_ids"][place] = wrong
    words = (
        f"micro-batch {place[0] // 2} has the id {wrong} in row {place[0] % 2}, position {place[1]}; expected ids from"
    )
    with pytest.raises(InputError, match=f"{words} 0 to 19"):
        prepare(Group(0, {}), given, vocabulary=20)
    assert prepare(Group(0, {}), given).tokens == 19


class Defaults(StageHooks):
    def build_model(self) -> nn.Module:
        return nn.Identity()


def test_labels_that_repeat_the_input_are_warned_about_on_the_first_rank() -> None:
    def messages(labels: Tensor, hooks: StageHooks, rank: int = 0) -> list[str]:
        other: Any = Group(rank, {1 - rank: (1, 2, 10, 20)})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            BatchPreparation(hooks, Batching(), other, [[0], [1]], 2).begin({"input_ids": ids, "labels": labels})
        return [str(warning.message) for warning in caught]

    ids = torch.arange(40).view(4, 10)
    repeated = ids.masked_fill(ids % 10 > 7, -100)
    (message,) = messages(repeated, Defaults())
    assert message.startswith(
        "labels equal input_ids, so the model learns to repeat its input; expected the next token"
    )
    assert not messages(shift_labels(ids), Defaults())
    assert not messages(repeated, Defaults(), rank=1)
    assert not messages(repeated, Hooks())  # its own loss_tokens


def test_rows_that_fill_up_have_no_tokens() -> None:
    step = prepare(Group(0, {}), batch(3))
    assert (step.tokens, step.cut.rows, step.cut.padded_rows) == (14, 3, 1)


def test_micro_batches_are_padded_to_the_longest_of_the_pipelines_ranks() -> None:
    step = prepare(Group(0, {1: [1, 2, 8, 19]}), batch())
    assert {tuple(one.args[0].shape) for one in step.micro_batches} == {(2, 8)}
    assert all((one.target["labels"][:, 5:] == -100).all() for one in step.micro_batches)


def test_another_pipelines_length_is_its_own_but_its_tokens_count() -> None:
    group = Group(1, {0: [1, 2, 9, 7], 2: [1, 2, 9, 7], 3: [1, 2, 5, 19]})
    step = prepare(group, batch(), pipelines=[[0, 2], [1, 3]])
    assert step.micro_batches[0].args[0].shape == (2, 5)
    assert step.tokens == 7 + 19


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("words", "the batch is a str"),
        ({"input_ids": torch.zeros(0, 5)}, "no rows"),
        (batch() | {"labels": torch.ones(4, 3, dtype=torch.long)}, "the lengths"),
        ([{**batch(1), "cu_seq_lens_q": torch.tensor([0, 9])}, batch(1)], "cu_seq_lens_q"),
    ],
    ids=["no mapping", "no rows", "two lengths", "documents beyond the row"],
)
def test_a_rank_tells_the_others_that_its_batch_is_broken_and_raises_only_then(broken: Any, says: str) -> None:
    group = Group(0, {1: [1, 2, 5, 19]})
    preparation = make(group)
    prepared = preparation.begin(broken)
    assert group.sent == [[0] * 6]
    with pytest.raises(InputError, match=says):
        preparation.finish(prepared)


def test_an_error_of_the_users_own_keeps_its_type() -> None:
    preparation = make(Group(0, {}))
    with pytest.raises(KeyError, match="labels"):
        preparation.finish(preparation.begin({"input_ids": torch.zeros(4, 5, dtype=torch.long)}))


def test_a_rank_whose_batch_is_good_names_the_one_whose_is_not() -> None:
    with pytest.raises(InputError, match=r"rank\(s\) 1, 2 could not use their batch"):
        prepare(Group(0, {1: [0, 0, 0, 0], 2: [0, 0, 0, 0]}), batch())


@pytest.mark.parametrize("numbers", [[1, 3, 5, 19], [1, 2, 5, 18]], ids=["rows", "tokens"])
def test_ranks_of_one_pipeline_with_different_batches_are_refused(numbers: list[int]) -> None:
    with pytest.raises(InputError, match=r"different batches.*\(2, 5, 19, 0\) on rank 0.*distributed_sampler_kwargs"):
        prepare(Group(0, {1: numbers}), batch())


def test_packed_rows_have_their_last_document_grow_to_the_common_length() -> None:
    items = [
        batch(1, length) | {"cu_seq_lens_q": torch.tensor([0, 2, length]), "max_length_q": length - 2}
        for length in (6, 5)
    ]
    step = prepare(Group(0, {}), items)
    assert [one.kwargs["cu_seq_lens_q"].tolist() for one in step.micro_batches] == [[0, 2, 6], [0, 2, 6]]
    assert [one.kwargs["max_length_q"] for one in step.micro_batches] == [4, 4]
    assert step.tokens == 5 + 4


def test_too_long_a_sequence_of_another_pipeline_is_an_error_here_too() -> None:
    with pytest.raises(InputError, match=r"9 tokens.*maximum is 8"):
        prepare(Group(0, {1: [1, 2, 9, 7]}), batch(), pipelines=[[0], [1]], max_length=8)
