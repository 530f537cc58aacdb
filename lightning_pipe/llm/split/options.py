"""Options that say where a model is cut into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number, is_whole_numbers

__all__ = ["SplitOptions"]

Balance = Literal["layers", "time", "memory"]
TiedEmbeddings = Literal["sum", "refuse"]


@dataclass(frozen=True)
class SplitOptions:
    """Where a model is cut into stages.

    At most one of ``layers_per_stage``, ``layer_ranges``, a trace (``split_spec``, ``split_policy``) and a ``balance``
    other than ``layers`` may be given.

    Args:
        layers_per_stage: number of layers of each stage; by default as ``balance`` says.
        layer_ranges: pairs (first layer, one after the last), one pair for each stage.
        balance: the same number of ``layers`` on each stage (default), or the most even ``time`` or ``memory``. These
            are measured when training is set up, with the module's ``example_micro_batch``.
        input_weight: number of layers that the modules before the first layer count as, in an even split (default 1).
        output_weight: number of layers that the modules after the last layer count as (default 1).
        split_spec: for models that are not lists of layers: the forward is traced with ``example_micro_batch``, and cut
            at the ``beginning`` or ``end`` of these modules (by FQN), and where it calls ``pipe_split``.
        split_policy: function that puts split points into a trace, as for PyTorch's ``pipeline``; ``equal_size`` gives
            each stage the same number of parameters.
        tied_embeddings: for stages on two ranks that hold one parameter, an embedding and a head: ``sum`` the gradients
            of both copies in every step (default), or ``refuse`` such a model.

    Raises:
        SetupError: a value of the wrong kind, or two ways to cut.
    """

    layers_per_stage: Sequence[int] | None = None
    layer_ranges: Sequence[Sequence[int]] | None = None
    balance: Balance = "layers"
    input_weight: int = 1
    output_weight: int = 1
    split_spec: Mapping[str, Any] | None = None
    split_policy: Any = None
    tied_embeddings: TiedEmbeddings = "sum"

    def __post_init__(self) -> None:
        check_choice("split.balance", self.balance, get_args(Balance))
        check_choice("split.tied_embeddings", self.tied_embeddings, get_args(TiedEmbeddings))
        check_whole_number("split.input_weight", self.input_weight, 0)
        check_whole_number("split.output_weight", self.output_weight, 0)
        layers, ranges = self.layers_per_stage, self.layer_ranges
        if layers is not None and not is_whole_numbers(layers):
            raise SetupError(f"split.layers_per_stage is {layers!r}; expected a list of whole numbers, one a stage")
        if ranges is not None and not (
            isinstance(ranges, list | tuple) and all(is_whole_numbers(pair) and len(pair) == 2 for pair in ranges)
        ):
            raise SetupError(
                f"split.layer_ranges is {ranges!r}; expected a list of pairs, the first layer of each stage and the one"
                " after its last"
            )
        ways = {
            "split.layers_per_stage": layers is not None,
            "split.layer_ranges": ranges is not None,
            "split.split_spec or split.split_policy": self.traces,
            "split.balance": self.balance != "layers",
        }
        given = [name for name, is_given in ways.items() if is_given]
        if len(given) > 1:
            raise SetupError(f"{' and '.join(given)} each say where the model is cut; expected one of them")

    @property
    def traces(self) -> bool:
        """True if the model is cut by tracing its forward."""
        return self.split_spec is not None or self.split_policy is not None
