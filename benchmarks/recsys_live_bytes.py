"""What batches in flight take: the most bytes of live tensors under each exact plan, over those of the serial plan.

``torchrun --nproc-per-node 2 -m benchmarks.recsys_live_bytes`` trains the model of :mod:`recsys_model` under
the serial plan and under each plan that works ahead, on the same batches, and counts what every rank holds. A plan that
works ``n`` batches ahead holds ``n`` batches more than the serial one, so that is what it may take::

    (most bytes of the plan in a step - most bytes of the serial plan in that step) / bytes of the n batches behind it

for each step and rank; the figure is the worst of them, with quartiles (aim: at most 1.1).

Counted is what a process allocates for tensors: the storages that come out of an operation, once each, whatever views
there are of them, from when the operation returns to when nothing holds them any more; on the main thread, the
pipeline's own threads and in backward. Not counted are tensors that were there before: parameters and optimiser states,
and the loader's batches, which a copy takes to the device (on a CPU it clones them, since nothing else would be the
device's). Messages under way are tensors, and counted. The bytes of a batch are those of its dense features, labels,
ids and lengths, and of its distributed form: ids and lengths that this rank has of it after TorchRec's own input dist;
not of what is derived from these, such as offsets, and not of messages.

All plans must lose the same, to the bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec import KeyedJaggedTensor

from benchmarks.figures import Figure, add_options, at_most, quartiles, save
from benchmarks.recsys_model import Batch, batches, ours
from lightning_pipe.recsys.sharding.shard import ShardedModel
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline

PLANS = ("base", "prefetch", "early_prefetch", "fused_sparse_dist")
LIMIT = 1.1
WARM_UP = 4  # steps: the first ones resolve the model, fill the pipeline, and make gradients and optimiser states


class LiveStorages:
    """Bytes of the storages that operations made, until they are gone.

    Attributes:
        now: at present.
        peak: the most since it was last set.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._lock = threading.RLock()  # a storage may go while one is being noted
        self.now = 0
        self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this thread, and in all that begin meanwhile, for as long as those live."""
        run = threading.Thread.run

        def counted(thread: threading.Thread) -> None:
            with _Mode(self):
                run(thread)

        with mock.patch.object(threading.Thread, "run", counted), _Mode(self):
            yield

    def note(self, tensors: Iterable[Tensor], taken: Iterable[Tensor]) -> None:
        """Of an operation: what it gave, and what it was given."""
        old = {one.untyped_storage()._cdata for one in taken}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            with self._lock:
                if storage._cdata in old or storage._cdata in self._known:
                    continue
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        with self._lock:
            self._known.remove(key)
            self.now -= size


class _Mode(TorchDispatchMode):
    """Tells a :class:`LiveStorages` of every operation of a thread."""

    def __init__(self, storages: LiveStorages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given, taken = (
            [one for one in tree_leaves(some) if isinstance(one, Tensor)] for some in (output, (args, kwargs))
        )
        self._storages.note(given, taken)
        return output


class Copied(Batch):
    """A batch that is copied on a CPU too."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy."""
        ids = self.sparse
        copies = (ids.values(), ids.lengths(), self.dense, self.label)
        values, lengths, dense, label = (one.to(device, non_blocking=non_blocking, copy=True) for one in copies)
        return Batch(dense, KeyedJaggedTensor(ids.keys(), values, lengths=lengths), label)


@dataclass
class Run:
    """Of each step what it lost, and the most bytes of live tensors in it."""

    losses: list[float]
    most: list[int]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, once each."""
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


def distributed_bytes(sharded: ShardedModel, data: list[Batch]) -> list[int]:
    """Of each batch, the ids and lengths that this rank is sent by TorchRec's input dist."""
    (module,) = sharded.sharded_modules.values()
    found = []
    for batch in data:
        pieces: Any = module.input_dist(module.create_context(), batch.sparse).wait().wait()
        found.append(bytes_of(tensor for piece in pieces for tensor in (piece.values(), piece.lengths())))
    return found


def trained(plan: str, data: list[Batch], options: argparse.Namespace, device: torch.device) -> tuple[Run, int]:
    """Under *plan*; and how many batches it works ahead."""
    sharded, optimizer = ours(options, device, None)
    live, run = LiveStorages(), Run([], [])
    with live.counting():
        pipeline = TrainPipeline(sharded, optimizer, device, plan=plan)
        feed = iter(data)
        while True:
            live.peak = live.now
            try:
                loss = pipeline.progress(feed)[0]
            except StopIteration:
                break
            run.most.append(live.peak)
            run.losses.append(float(loss))
            del loss
        ahead = pipeline.pipeline.plan.max_stage
        pipeline.close()
    return run, ahead


def main() -> None:
    """Print a line for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("tables", 8),
        ("rows", 20_000),
        ("width", 32),
        ("pooling", 20),
        ("batch", 1024),
        ("dense", 16),
        ("steps", 24),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mlp", type=int, nargs="*", default=[64])
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    made = batches(options, rank, on_gpu)
    copied = [Copied(one.dense, one.sparse, one.label) for one in made]
    # A few more than are looked at: behind the last of those there are as many as a plan works ahead.
    data = [copied[index % len(copied)] for index in range(WARM_UP + options.steps + 4)]
    sizes = batch_sizes(data, options, device)
    serial, _ = trained("serial", data, options, device)
    figures = []
    for plan in options.plans:
        run, ahead = trained(plan, data, options, device)
        if run.losses != serial.losses:
            raise SystemExit(f"rank {rank}: under {plan} it lost {run.losses}, under serial {serial.losses}")
        steps = range(WARM_UP, WARM_UP + options.steps)
        more = [run.most[step] - serial.most[step] for step in steps]
        behind = [sum(sizes[step + 1 : step + 1 + ahead]) for step in steps]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (more, behind))
        figures.append(show(plan, ahead, everyone, statistics.median(serial.most[step] for step in steps), on_gpu))
    if rank == 0:
        save(figures, options.json)
    dist.barrier()
    dist.destroy_process_group()


def batch_sizes(data: list[Batch], options: argparse.Namespace, device: torch.device) -> list[int]:
    """Bytes of each batch, with its distributed form."""
    sharded, _ = ours(options, device, None)
    given = [batch.to(device) for batch in data]
    itself = [bytes_of((one.dense, one.label, one.sparse.values(), one.sparse.lengths())) for one in given]
    return [one + other for one, other in zip(itself, distributed_bytes(sharded, given), strict=True)]


def show(plan: str, ahead: int, everyone: list[Any], serial: float, on_gpu: bool) -> Figure:
    """Prints a plan's line on rank 0; returns its figure."""
    ratios = [one / other for more, behind in everyone for one, other in zip(more, behind, strict=True)]
    low, high = quartiles(ratios)
    if dist.get_rank() == 0:
        more, behind = everyone[0]
        print(
            f"{plan:<18} {ahead} batches ahead: {statistics.median(more) / 1e6:7.3f} MB over serial's"
            f" {serial / 1e6:.3f}; those batches {statistics.median(behind) / 1e6:7.3f}; ratio at worst"
            f" {max(ratios):.3f} ({low:.3f} .. {high:.3f}), aim at most {LIMIT}",
            flush=True,
        )
    name = f"recsys live bytes over serial, {plan} / batches ahead x bytes of a batch" + " (cuda)" * on_gpu
    return at_most(name, max(ratios), LIMIT, (low, high))


if __name__ == "__main__":
    main()
