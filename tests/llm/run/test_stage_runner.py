"""A loop of one's own over stages: what the strategy trains, to the bit, with calls of any size in any order."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.run.stage_runner import StageHooks, StageRunner
from tests.distributed import run_ranks
from tests.strategies.llm_cases import (
    SEED,
    Tiny,
    TinyHF,
    TinyLM,
    differing,
    fit,
    hf_config,
    llm,
    loader,
    microbatches_of,
    row_batches,
    sgd,
    values_of,
)

STEPS = 3
# schedule, options, norm to clip to
CASES: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "clipped": ("interleaved_zero_bubble", {}, 0.05),
    "in a V": ("zbv_zero_bubble", {"activation_checkpoint": {"mode": "full"}}, None),
    "in half precision": ("1f1b", {}, 0.05),
    "sharded": ("1f1b", {"parallel": {"pp": 1, "dp_shard": 2}}, 0.05),
}
# Numbers of micro-batches and lengths of calls: fewer than the stages, more, the same again.
CALLS = [(4, 9), (1, 5), (3, 12), (1, 5), (4, 9), (2, 12), (7, 5)]


class Hooks(StageHooks):
    """The model of ``Tiny``, without Lightning."""

    def build_model(self) -> nn.Module:
        return TinyLM()


class Failing(Hooks):
    fails = False

    def summed_loss(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
        if self.fails:
            raise KeyError("no such label")
        return super().summed_loss(output, micro_batch)

    def prediction(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Any:
        return "words"


class Tied(Hooks):
    def build_model(self) -> nn.Module:
        model: Any = TinyHF(hf_config("llama") | {"tie_word_embeddings": True}).build_model()
        return nn.Module.train(model)


def make(hooks: StageHooks | None = None, *args: Any, **options: Any) -> tuple[StageRunner, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    runner = StageRunner(Hooks() if hooks is None else hooks, *args, **options)
    return runner, sgd(runner.model.parameters())


def calls() -> list[list[dict[str, Tensor]]]:
    batches = row_batches(len(CALLS), 2 * max(count for count, _ in CALLS), [length for _, length in CALLS])
    return [
        microbatches_of({key: value[: 2 * count] for key, value in batch.items()}, count)
        for batch, (count, _) in zip(batches, CALLS, strict=True)
    ]


def whole(model: nn.Module | None) -> dict[str, Tensor]:
    return {n: one.full_tensor() if isinstance(one, DTensor) else one for n, one in values_of(model).items()}


def by_runner(case: str, rank: int) -> dict[str, Any]:
    schedule, options, norm = CASES[case]
    half = case == "in half precision"
    runner, optimizer = make(None, schedule, scaler=torch.amp.GradScaler("cpu") if half else None, **options)
    losses, norms = [], []
    for batch in row_batches(STEPS):
        mine = batch if case != "sharded" else {key: value[rank::2] for key, value in batch.items()}
        with torch.autocast("cpu", torch.float16, enabled=half):
            result = runner.forward_backward(microbatches_of(mine, 4))
        losses.append(float(result.loss))
        norms.append(runner.optimizer_step(optimizer, max_norm=norm))
    assert [one is None for one in norms] == [norm is None] * STEPS
    runner.model.eval()
    with torch.autocast("cpu", torch.float16, enabled=half):
        predicted = torch.cat(runner.forward_only(microbatches_of(row_batches(1)[0], 4)))
    return {"losses": losses, "predicted": predicted, **whole(runner.model)}


def by_strategy(case: str, rank: int) -> dict[str, Any]:
    schedule, options, norm = CASES[case]
    module = Tiny()
    data = row_batches(STEPS)
    if case == "sharded":
        data = [{key: value[rank::2] for key, value in batch.items()} for batch in data]
    half = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if case == "in half precision" else None
    used = fit(
        module,
        llm(schedule, 4, **options),
        data,
        gradient_clip_val=norm,
        use_distributed_sampler=False,
        plugins=half,
    )
    predicted: Any = used.predict(module, loader(row_batches(1)))
    return {"losses": module.losses, "predicted": predicted[0], **whole(module.model)}


def many_calls(**options: Any) -> dict[str, Any]:
    runner, optimizer = make(**options)
    losses = []
    for index, micro_batches in enumerate(calls()):
        losses.append(float(runner.forward_backward(micro_batches).loss))
        if index % 3:  # the first two of three make one step
            runner.optimizer_step(optimizer)
    schedules = len(runner._parts.runner._cache)
    with torch.no_grad():
        again = float(runner.forward_backward(calls()[0]).loss)
    return {"losses": losses, "again": again, "schedules": schedules, **values_of(runner.model)}


def message(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def faults(rank: int) -> dict[str, Any]:
    hooks = Failing()
    runner, optimizer = make(hooks)
    first, second = calls()[0], calls()[2]
    runner.forward_backward(second)
    hooks.fails = True
    found: dict[str, Any] = {"loss": message(lambda: runner.forward_backward(first))}
    hooks.fails = False
    found["prediction"] = message(lambda: runner.forward_only(first))
    found["numbers"] = message(lambda: runner.forward_backward(first[: 1 + rank]))
    found["nothing"] = message(lambda: runner.forward_backward([]))
    found["mapping"] = message(lambda: runner.forward_backward(first[0]))  # type: ignore[arg-type]
    found["id"] = message(lambda: make(Tied())[0].forward_backward([{"input_ids": torch.tensor([[1, 2], [3, 99]])}]))
    runner.forward_backward(first)
    runner.optimizer_step(optimizer)
    other, steps = make()
    other.forward_backward(first)
    other.optimizer_step(steps)
    found["after"] = differing(values_of(runner.model), values_of(other.model))
    found["arguments"] = message(lambda: make(None, ("1f1b", "gpipe")[rank]))
    copies, _ = make(Tied())
    trained = [one for name, one in copies.model.named_parameters() if rank == 0 or "embed" not in name]
    found["copies"] = message(lambda: copies.optimizer_step(sgd(trained)))
    return found


def described(schedule: str, **options: Any) -> str:
    runner, _ = make(None, schedule, **options)
    with redirect_stdout(StringIO()) as printed, mock.patch.dict(os.environ, {"COLUMNS": "200"}):
        runner.print_stages()
    return printed.getvalue()


def on_two_ranks(rank: int, world: int) -> dict[str, Any]:
    tables = described("zbv_zero_bubble"), described("1f1b", parallel={"pp": 1, "dp_shard": 2})
    compared = {case: (by_runner(case, rank), by_strategy(case, rank)) for case in CASES}
    calls = {"kept": many_calls(), "released": many_calls(batching={"schedule_cache_bytes": 0})}
    return {"compared": compared, "calls": calls, "faults": faults(rank), "tables": tables}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("case", CASES)
def test_steps_and_predictions_are_those_of_the_strategy_to_the_bit(case: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        own, of_strategy = rank["compared"][case]
        assert own.pop("losses") == of_strategy.pop("losses")
        assert len(own) > 4
        assert differing(own, of_strategy) == []


def trained_alone(batches: Sequence[Sequence[Mapping[str, Tensor]]]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(SEED)
    hooks = Hooks()
    model = hooks.build_model()
    optimizer = sgd(model.parameters())
    losses, tokens = [], 0
    for index, micro_batches in enumerate(batches):
        summed = []
        for item in micro_batches:
            loss = hooks.summed_loss(model(item["input_ids"]), item)
            loss.backward()
            summed.append(loss.detach())
        counted = sum(hooks.loss_tokens(item) for item in micro_batches)
        losses.append(float(torch.stack(summed).sum() / counted))
        tokens += counted
        if index % 3:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 / tokens)
            optimizer.step()
            optimizer.zero_grad()
            tokens = 0
    return losses, values_of(model)


@pytest.mark.parametrize(("way", "schedules"), [("kept", len(set(CALLS))), ("released", 1)])
def test_calls_of_any_size_in_any_order_are_a_plain_loop_and_use_schedules_again(
    way: str, schedules: int, ranks: list[dict[str, Any]]
) -> None:
    losses, parameters = trained_alone(calls())
    together: dict[str, Tensor] = {}
    for rank in ranks:
        found = dict(rank["calls"][way])
        assert found.pop("losses") == losses
        assert found.pop("schedules") == schedules
        assert found.pop("again") == ranks[0]["calls"][way]["again"] != losses[0]
        together |= found
    assert differing(together, parameters) == []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("loss", "no such label"),
        ("prediction", "the result of a micro-batch is a str of ['str']; expected a tensor"),
        ("numbers", "InputError: the ranks have [1, 2] micro-batches"),
        ("nothing", "InputError: the call has no micro-batch; expected a list of micro-batches"),
        ("mapping", "InputError: the call has a mapping; expected a list of micro-batches"),
        ("id", "InputError: input_ids of micro-batch 0 has the id 99 in row 1, position 1"),
        ("arguments", "SetupError: the runner's configuration differs between ranks"),
        ("copies", "SetupError: model.embed_tokens.weight is one parameter of which two ranks hold copies"),
    ],
)
def test_an_error_is_raised_on_every_rank(what: str, words: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert words in rank["faults"][what]


def test_gradients_of_a_step_with_an_error_are_discarded(ranks: list[dict[str, Any]]) -> None:
    assert [rank["faults"]["after"] for rank in ranks] == [[], []]


def test_what_each_rank_holds_is_printed_on_the_first(ranks: list[dict[str, Any]]) -> None:
    stages, shards = ranks[0]["tables"]
    assert ranks[1]["tables"] == ("", "")
    assert [line.split() for line in stages.splitlines()[2:]] == [
        ["0", "0", "528", "2,112", "embedding", "(Embedding),", "layers.0", "(Block)"],
        ["0", "3", "187", "748", "norm", "(LayerNorm),", "head", "(Linear)"],
        ["1", "1", "560", "2,240", "layers.1-2", "(Block)"],
        ["1", "2", "280", "1,120", "layers.3", "(Block)"],
    ]
    rows = [line.split()[:4] for line in shards.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["0", "0", "1,555"], ["1", "0", "1,555"]]
    assert sum(int(row[3].replace(",", "")) for row in rows) == 4 * 1555


# By schedule: numbers of micro-batches of an epoch's calls, of which the last are not supported on two ranks, and the
# schedule that these run under.
REPLACED = {
    "1f1b": ([2, 1, 1], "gpipe"),
    "interleaved_zero_bubble": ([4, 5, 7], "looped_bfs"),
    "dualpipev": ([4, 3, 2], "zbv_zero_bubble"),
}


def said_of(work: Callable[..., object], *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work(*args)
    return [str(warning.message) for warning in caught if "num_microbatches" in str(warning.message)]


def said_by_schedule(rank: int, world: int) -> dict[str, list[list[str]]]:
    said = {}
    for schedule, (numbers, _) in REPLACED.items():
        runner, _ = make(None, schedule)
        epoch = [[calls()[0][0]] * number for number in numbers]
        evaluated = torch.no_grad()(runner.forward_backward)
        said[schedule] = [said_of(evaluated, epoch[-1]), said_of(runner.forward_only, epoch[-1])]
        said[schedule] += [said_of(runner.forward_backward, batch) for batch in epoch]
    uneven = [*row_batches(1), {key: value[:2] for key, value in row_batches(2)[1].items()}]
    said["strategy"] = [said_of(fit, Tiny(), llm("1f1b", 4), uneven)]
    return said


def test_a_schedule_that_replaces_another_for_a_number_of_micro_batches_is_named_once_on_the_first_rank() -> None:
    first, second = run_ranks(said_by_schedule, 2)
    for schedule, (numbers, other) in REPLACED.items():
        *others, (said,), again = first[schedule]
        assert others == [[], [], []]  # evaluations, and a call with a number that is supported
        assert again == []
        assert said.startswith(f"num_microbatches is {numbers[1]}; schedule {schedule} needs")
        assert f"run under {other}, with the same results, but more" in said
        assert second[schedule] == [[]] * 5
    # The strategy adds rows to its smaller last batch, and leaves out no micro-batch.
    assert first["strategy"] == second["strategy"] == [[]]


def settings_of_compiled_functions(rank: int, world: int) -> list[bool]:
    found = [torch._functorch.config.donated_buffer]
    runner = StageRunner(Hooks(), "zbv_zero_bubble")
    found.append(torch._functorch.config.donated_buffer)
    del runner
    gc.collect()
    return [*found, torch._functorch.config.donated_buffer]


def test_the_setting_of_compiled_functions_for_two_backwards_ends_with_the_runner() -> None:
    (found,) = run_ranks(settings_of_compiled_functions, 1)
    assert found == [True, False, True]


def test_a_process_group_is_needed() -> None:
    assert not dist.is_initialized()
    with pytest.raises(SetupError, match=r"no process group is initialized.*torchrun"):
        StageRunner(Hooks())
