"""Options for the split of a model into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number, is_whole_numbers

Balance = Literal["layers", "time", "memory"]
TiedEmbeddings = Literal["sum", "refuse"]


@dataclass(frozen=True)
class SplitOptions:
    """Points at which a model is cut into stages.

    At most one of ``layers_per_stage``, ``layer_ranges`` and a ``balance`` other than ``layers`` may be given.

    Args:
        layers_per_stage: number of layers of each stage (default None: follow ``balance``).
        layer_ranges: one pair (first layer, one past the last layer) for each stage (default None: follow ``balance``).
        balance: quantity that is spread evenly over the stages: the number of ``layers`` (default), ``time`` or
            ``memory``. Time and memory are measured during setup, with the module's ``example_micro_batch``.
        input_weight: number of layers that the modules before the first layer count as (default 1). Used when
            ``balance`` is ``layers``.
        output_weight: number of layers that the modules after the last layer count as (default 1). Used when
            ``balance`` is ``layers``.
        tied_embeddings: handling of a parameter that stages on two ranks share, such as the weight of an embedding and
            a head: ``sum`` the gradients of all copies in every step (default), or ``refuse`` such a model.

    Raises:
        SetupError: a value has the wrong type or range, or more than one way to cut is given.
    """

    layers_per_stage: Sequence[int] | None = None
    layer_ranges: Sequence[Sequence[int]] | None = None
    balance: Balance = "layers"
    input_weight: int = 1
    output_weight: int = 1
    tied_embeddings: TiedEmbeddings = "sum"

    def __post_init__(self) -> None:
        check_choice("split.balance", self.balance, get_args(Balance))
        check_choice("split.tied_embeddings", self.tied_embeddings, get_args(TiedEmbeddings))
        check_whole_number("split.input_weight", self.input_weight, 0)
        check_whole_number("split.output_weight", self.output_weight, 0)
        layers, ranges = self.layers_per_stage, self.layer_ranges
        if layers is not None and not is_whole_numbers(layers):
            raise SetupError(
                f"split.layers_per_stage is {layers!r}; expected a list of whole numbers, one for each stage"
            )
        if ranges is not None and not (
            isinstance(ranges, list | tuple) and all(is_whole_numbers(pair) and len(pair) == 2 for pair in ranges)
        ):
            raise SetupError(
                f"split.layer_ranges is {ranges!r}; expected a list of pairs, one (first layer, one past the last"
                " layer) for each stage"
            )
        ways = {
            "split.layers_per_stage": layers is not None,
            "split.layer_ranges": ranges is not None,
            "split.balance": self.balance != "layers",
        }
        chosen = [name for name, is_given in ways.items() if is_given]
        if len(chosen) > 1:
            raise SetupError(
                f"{' and '.join(chosen)} are given, expected only one way to cut the model. Remove the others"
            )
