"""An ``nn.Sequential`` on several devices of one process, which work on different micro-batches at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import InputError, IterContext, PipelinePlan, SetupError, TaskSpan
from lightning_pipe.environment import require_torch
from lightning_pipe.pipe.batch_norm import defer_batch_norm, undefer_batch_norm
from lightning_pipe.pipe.gradients import attach, attach_loss
from lightning_pipe.pipe.loss import LossFunction, MiniBatchLoss, Reduction, total_of
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.partitioning import Checkpoint, check_checkpoint, check_sequential, make_partitions
from lightning_pipe.pipe.plans import gradient_field, value_field
from lightning_pipe.pipe.run import Run
from lightning_pipe.pipe.scatter import gather, rows_of, to_device
from lightning_pipe.pipe.scheduler import Scheduler
from lightning_pipe.pipe.skip import SkipRoute

__all__ = ["Pipe", "pipe_loss"]


class Pipe(nn.Module):
    """Runs a Sequential's layers in partitions, each on a device and in a thread of its own.

    A mini-batch is cut into micro-batches along its first dimension; while one partition is at a micro-batch, the one
    before it is at the next. Forward, backward and recomputation run in parallel, on CPUs too. Outputs, gradients and
    parameters are those of the Sequential on the same micro-batches, to the bit: what a layer does with a whole batch
    at once, such as batch normalisation, it does with each micro-batch.

    The layers stay what they are, with their hooks, and are moved to their devices; keys of the state dict are the
    Sequential's. Gradients and the optimiser's states are on the devices of their parameters.

    The design is GPipe's (Huang et al., 2019) as torchgpipe built it (Kim et al., 2020); :meth:`loss` runs 1F1B
    (Narayanan et al., 2019).

    Args:
        module: the Sequential.
        chunks: micro-batches to cut a mini-batch into. The more there are, the less partitions wait for each other:
            the part of the time is ``(n - 1) / (chunks + n - 1)`` with *n* partitions.
        checkpoint: which micro-batches keep no activations and run again before their backward: ``"always"`` all,
            ``"except_last"`` all but the last one, whose backward follows at once, ``"never"`` none. In :meth:`loss`
            what follows at once is the last partition's: ``"except_last"`` leaves that out.
        devices: of the partitions; one may be there several times. By default all GPUs, and without any the CPU, once
            for each entry of *balance*.
        balance: the number of layers of each partition. By default they are shared out by their parameters;
            ``balance_by_time`` and ``balance_by_memory`` measure.
        deferred_batch_norm: move the running statistics of batch normalisations once a mini-batch, to those of all of
            its rows; the layers are replaced for that.

    Raises:
        PlanError: a balance that does not fit, fewer layers than devices, no chunk.
        SetupError: no Sequential, a parameter in two partitions, a skip that leads nowhere, a device that is not there.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int,
        checkpoint: Checkpoint = "except_last",
        devices: Iterable[torch.device | str | int] | None = None,
        balance: Sequence[int] | None = None,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_sequential(module)
        self.chunks = chunks
        self.checkpoint = checkpoint
        check_checkpoint(chunks, checkpoint)
        self._partitions: list[Partition] = []
        self._routes: list[SkipRoute] = []
        self._scheduler: Scheduler | None = None
        self._loss_scale: Callable[[], float] | None = None
        self._known_losses: set[Any] = set()  # kinds of functions that are known to return means
        self._deferred: dict[nn.Module, nn.Module] = {}  # by what is there now, what was there
        if any(isinstance(one, Pipe) for layer in module for one in layer.modules()):
            raise SetupError(
                "a layer of the Sequential holds a Pipe; needed is one pipe over all layers, not one in another"
            )
        own = {*dir(type(self)), *vars(self)}
        for name in module._modules:
            if name in own:
                raise SetupError(
                    f"the Sequential has a layer {name!r}, which is the name of something else of a Pipe; give it"
                    " another"
                )
        if deferred_batch_norm:
            defer_batch_norm(module, self._deferred)
        for name, layer in module._modules.items():
            self.add_module(name, layer)
        # The Sequential's own hooks, of every kind.
        self.__dict__.update({name: hooks for name, hooks in module.__dict__.items() if "hook" in name})
        self.training = module.training  # and no layer's: some may be frozen
        try:
            self._partitions, self._routes = make_partitions([*self], devices, balance)
        except BaseException:
            undefer_batch_norm(module, self._deferred)
            raise

    # ------------------------------------------------------------------ what it is made of

    @property
    def devices(self) -> list[torch.device]:
        """Of the partitions."""
        return [partition.device for partition in self._partitions]

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition."""
        return [len(partition.layers) for partition in self._partitions]

    @property
    def deferred(self) -> dict[nn.Module, nn.Module]:
        """By each batch normalisation that *deferred_batch_norm* has put into the Sequential, the one before it."""
        return self._deferred

    @property
    def plans(self) -> dict[str, PipelinePlan]:
        """What runs when: the plans of forward, of backward, and of :meth:`loss`."""
        return self._schedule.plans

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int | slice) -> nn.Module:
        """A layer; or some, as a plain Sequential, which runs them where they are and not as a pipe."""
        layers = [*self]
        return nn.Sequential(*layers[index]) if isinstance(index, slice) else layers[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for layer in self._modules.values() if layer is not None)

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, balance={self.balance}, devices={self.devices}"

    def compile_partitions(self, **options: Any) -> Pipe:
        """Have ``torch.compile`` make one function of each partition's layers; returns the pipe.

        Partitions that draw random numbers run as they are, with a warning. Hooks of layers are compiled in.

        Args:
            options: those of ``torch.compile``.

        Raises:
            SetupError: torch is older than 2.13.
        """
        require_torch("2.13", "compiled partitions", reason="where compiling in two threads at once does not crash")
        for partition in self._partitions:
            partition.compile(**options)
        return self

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any) -> Any:
        """Run the layers.

        Args:
            inputs: of the first layer: tensors, in any nesting of tuples, lists and dictionaries, all with the same
                number of rows. They are moved to the first device. What is no tensor goes to every micro-batch.

        Returns:
            what the last layer returns, put together along the first dimension, on the last device.

        Raises:
            InputError: inputs that cannot be cut, or outputs that cannot be put together.
            SetupError: a layer, hook or loss function of this pipe calls it.
            Exception: what a layer raises, with a note of the partition and the micro-batch.
        """
        run = self._run(inputs, 6)  # through nn.Module's two calls
        last = len(self._partitions)
        outputs = self._schedule.run(
            "gpipe_forward", run.micro_batches(), lambda ctx: getattr(ctx, value_field(last)).value
        )
        run.check_generators()
        with torch.no_grad():
            gathered, spec = pytree.tree_flatten(gather(outputs, run.rows_of_micro_batches))
        if not run.grad:
            return pytree.tree_unflatten(gathered, spec)
        leaves = [pytree.tree_leaves(output) for output in outputs]
        places = [
            place
            for place in range(len(gathered))
            if any(isinstance(one[place], Tensor) and one[place].requires_grad for one in leaves)
        ]
        if places:
            sizes = {place: [len(one[place]) for one in leaves] for place in places}

            # Not the outputs themselves: they hold this function, and nobody would ever let go of both.
            count = len(gathered)

            def backward(gradients: list[Tensor | None]) -> Sequence[Tensor | None]:
                return run.backward(count, dict(zip(places, gradients, strict=True)), sizes)

            attached = attach([gathered[place] for place in places], run.upstream, backward)
            for place, tensor in zip(places, attached, strict=True):
                gathered[place] = tensor
        return pytree.tree_unflatten(gathered, spec)

    def loss(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFunction,
        *,
        reduction: Reduction | None = None,
    ) -> Tensor:
        """The loss of a mini-batch, with forwards and backwards in turns (1F1B).

        All of it happens here, so that a partition keeps as many micro-batches as there are partitions from it to the
        last, however many chunks there are, and the last layer's outputs exist for one micro-batch at a time. The
        gradients are kept apart, and the loss returned is a scalar whose ``backward()`` adds them, times its own
        gradient, to ``.grad``: it may be divided, scaled or added to others before, as any loss. Where no gradients are
        wanted (``torch.no_grad()``), this is a forward and a loss.

        Args:
            inputs: of the first layer: one value, or a tuple of them; see :meth:`forward`.
            targets: tensors, in any nesting, with as many rows; they are moved to the last device.
            loss_fn: called with what the last layer returns for a micro-batch, and its targets.
            reduction: whether *loss_fn* returns a mean over rows, or a sum. By default what its ``reduction`` says;
                a function that says nothing is to return a mean over rows, which is tried once on two parts of a
                micro-batch. ``nn.CrossEntropyLoss`` and ``nn.NLLLoss`` (and their functions, with no more arguments)
                may leave out targets and weigh classes: their mean is over those of the mini-batch that count.

        Returns:
            the loss of all rows: of means the mean, weighted by the micro-batches' rows.

        Raises:
            InputError: inputs and targets that cannot be cut alike, a loss that is no scalar, or that is neither a mean
                over rows nor said to be a sum.
        """
        of_all = MiniBatchLoss(loss_fn, reduction, self._known_losses)
        run = self._run(inputs if isinstance(inputs, tuple) else (inputs,), 4)
        targets = to_device(targets, self.devices[-1])
        if not run.rows:
            raise InputError("the inputs have no rows, of which there is no loss; leave such a mini-batch out")
        if rows_of(targets) != run.rows:
            raise InputError(f"the inputs have {run.rows} rows and the targets {rows_of(targets)}; needed are as many")
        scale = 1.0 if self._loss_scale is None else self._loss_scale()
        losses = of_all.of_micro_batches(targets, run.count, scale)
        micro_batches = run.micro_batches(losses)
        plan = "1f1b" if run.grad else "gpipe_forward"

        def first_gradients_of(ctx: IterContext) -> list[Tensor | None]:
            gradients: list[Tensor | None] = getattr(ctx, gradient_field(0)).value if run.grad else []
            return gradients

        with run.parameters_alone():
            first_gradients = self._schedule.run(plan, micro_batches, first_gradients_of)
        run.check_generators()
        of_all.check(losses[0])
        total = total_of(losses)
        if not run.grad or not run.upstream:
            return total
        known = run.collect(first_gradients)

        def gradients(given: Tensor) -> Sequence[Tensor | None]:
            factor = given / scale
            return [None if one is None else one * factor.to(one.device, one.dtype) for one in known]

        return attach_loss(total, run.upstream, gradients)

    # ------------------------------------------------------------------ measuring, and the end

    def start_trace(self, keep: int | None = None) -> None:
        """Record when each task runs: ``Forward0`` is partition 0's forward.

        Args:
            keep: the number of runs to keep of each plan, the latest; None for all.
        """
        self._schedule.start_trace(keep)

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the spans in the order in which they ended.

        Of a span *iteration* is the index of the micro-batch in its mini-batch.
        """
        return self._schedule.stop_trace()

    def scale_loss(self, scale: Callable[[], float] | None) -> None:
        """Have the backward inside :meth:`loss` run from the loss times a factor, which its gradients are divided by.

        Small gradients survive half precision by that, if the factor is the one that the loss is multiplied by
        afterwards (``torch.amp.GradScaler.get_scale``). The loss returned is not multiplied.

        Args:
            scale: gives the factor for each mini-batch; None for none.
        """
        self._loss_scale = scale

    def close(self) -> None:
        """End the worker threads. They end with the pipe, too; the next forward starts others."""
        if self._scheduler is not None:
            self._scheduler.close()

    def _run(self, inputs: tuple[Any, ...], depth: int) -> Run:
        check_checkpoint(self.chunks, self.checkpoint)
        if [*map(id, self)] != [id(layer) for partition in self._partitions for layer in partition.layers]:
            raise SetupError(
                "layers of the pipe were added or replaced after it was made, which its partitions do not know; change"
                " the Sequential, and make another Pipe of it"
            )
        # Nobody who evaluates wants layers to run twice; a gradient there is a rare thing.
        checkpoint = self.checkpoint if self.training else "never"
        return Run(self._partitions, self._schedule, self.chunks, checkpoint, inputs, depth)

    @property
    def _schedule(self) -> Scheduler:
        if self._scheduler is None:
            self._scheduler = Scheduler(self._partitions, self._routes)
        return self._scheduler

    def __getstate__(self) -> dict[str, Any]:
        # Threads stay where they are: a copy starts its own.
        return {**super().__getstate__(), "_scheduler": None, "_known_losses": set()}

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None and any(one != device for one in self.devices):
            self._refuse_move(f"to({str(device)!r})")
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        self._refuse_move("cuda()")

    def cpu(self) -> Pipe:
        if any(device.type != "cpu" for device in self.devices):
            self._refuse_move("cpu()")
        return self

    def _refuse_move(self, call: str) -> NoReturn:
        raise SetupError(
            f"{call} would move all partitions of a pipe to one device; its layers are on"
            f" {', '.join(map(str, self.devices))}: make another Pipe with other devices"
        )


def pipe_loss(
    module: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    *,
    reduction: Reduction | None = None,
) -> Tensor:
    """:meth:`Pipe.loss` of a pipe, and ``loss_fn(module(inputs), targets)`` of any other module.

    For a ``training_step`` that is to run with and without a pipe.

    Args:
        module: a pipe, or not.
        inputs: see :meth:`Pipe.loss`, as for the rest; a tuple is several inputs.
        targets: see there.
        loss_fn: see there.
        reduction: see there; means something to a pipe only.
    """
    if isinstance(module, Pipe):
        return module.loss(inputs, targets, loss_fn, reduction=reduction)
    output = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    return loss_fn(output, targets)
