"""Memory of batches in flight: peak bytes of live tensors under each exact plan, over those of the serial plan.

``torchrun --nproc-per-node 2 -m benchmarks.recsys_live_bytes`` trains the model of :mod:`recsys_model` under the serial
plan and under each plan that works ahead, on the same batches, and counts the bytes on every rank. A plan that works
``n`` batches ahead may hold ``n`` batches more than the serial plan. The ratio for each step and rank is::

    (peak bytes of the plan in a step - peak bytes of the serial plan in that step) / bytes of the n batches after it

The figure is the maximum of these ratios, with quartiles (aim: at most 1.1).

The count includes the storages of tensors that operations return, on the main thread, on the pipeline's threads and in
backward. A storage counts once, regardless of its views, from the end of the operation until its release. Messages in
flight are tensors and are included. Existing tensors are not: parameters, optimizer states and the loader's batches,
which are copied to the device (on a CPU they are cloned, so that the device's copy is counted). The bytes of a batch
are those of its dense features, labels, ids and lengths, and of its ids and lengths on this rank after TorchRec's input
dist, without derived tensors such as offsets, and without messages.

The benchmark fails if the losses of the plans are not equal to the bit.
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
from lightning_pipe.recsys.sharding.shard_model import ShardedModel
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline

PLANS = ("base", "prefetch", "early_prefetch", "fused_sparse_dist")
LIMIT = 1.1
WARM_UP = 4  # steps that resolve the model, fill the pipeline, and create gradients and optimizer states


class LiveStorages:
    """Bytes of the live storages that operations created.

    Attributes:
        current: current bytes.
        peak: maximum of the bytes since this attribute was last set.
    """

    def __init__(self) -> None:
        self._storage_ids: set[int] = set()
        self._lock = threading.RLock()  # a storage may be released while another is recorded
        self.current = 0
        self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this thread during the body, and in threads that start in the body until they end."""
        run = threading.Thread.run

        def counted(thread: threading.Thread) -> None:
            with _Mode(self):
                run(thread)

        with mock.patch.object(threading.Thread, "run", counted), _Mode(self):
            yield

    def note(self, tensors: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Record an operation's output *tensors*. Storages of its *inputs* are not new."""
        input_storages = {leaf.untyped_storage()._cdata for leaf in inputs}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            with self._lock:
                if storage._cdata in input_storages or storage._cdata in self._storage_ids:
                    continue
                self._storage_ids.add(storage._cdata)
                self.current += storage.nbytes()
                self.peak = max(self.peak, self.current)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        with self._lock:
            self._storage_ids.remove(key)
            self.current -= size


class _Mode(TorchDispatchMode):
    """Reports every operation of a thread to a :class:`LiveStorages`."""

    def __init__(self, storages: LiveStorages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        outputs, inputs = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (output, (args, kwargs))
        )
        self._storages.note(outputs, inputs)
        return output


class Copied(Batch):
    """A batch that is also copied on a CPU."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Copy of the batch on *device*."""
        ids = self.sparse
        copies = (ids.values(), ids.lengths(), self.dense, self.label)
        values, lengths, dense, label = (tensor.to(device, non_blocking=non_blocking, copy=True) for tensor in copies)
        return Batch(dense, KeyedJaggedTensor(ids.keys(), values, lengths=lengths), label)


@dataclass
class Run:
    """Loss and peak bytes of live tensors of each step."""

    losses: list[float]
    most: list[int]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Total bytes of the tensors' distinct storages."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def distributed_bytes(sharded: ShardedModel, data: list[Batch]) -> list[int]:
    """Bytes of the ids and lengths of each batch that TorchRec's input dist sends to this rank."""
    (module,) = sharded.sharded_modules.values()
    sizes = []
    for batch in data:
        pieces: Any = module.input_dist(module.create_context(), batch.sparse).wait().wait()
        sizes.append(bytes_of(tensor for piece in pieces for tensor in (piece.values(), piece.lengths())))
    return sizes


def trained(plan: str, data: list[Batch], options: argparse.Namespace, device: torch.device) -> tuple[Run, int]:
    """Train under *plan*, and return the run and the number of batches that the plan works ahead."""
    sharded, optimizer = ours(options, device, None)
    live, run = LiveStorages(), Run([], [])
    with live.counting():
        pipeline = TrainPipeline(sharded, optimizer, device, plan=plan)
        feed = iter(data)
        while True:
            live.peak = live.current
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
    originals = batches(options, rank, on_gpu)
    copied = [Copied(batch.dense, batch.sparse, batch.label) for batch in originals]
    # More batches than measured steps, so that the last measured step has the batches that a plan works ahead.
    data = [copied[index % len(copied)] for index in range(WARM_UP + options.steps + 4)]
    sizes = batch_sizes(data, options, device)
    serial, _ = trained("serial", data, options, device)
    figures = []
    for plan in options.plans:
        run, ahead = trained(plan, data, options, device)
        if run.losses != serial.losses:
            raise SystemExit(f"rank {rank}: expected serial's losses {serial.losses}, got {run.losses} under {plan}")
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
    """Bytes of each batch, including its part after the input dist."""
    sharded, _ = ours(options, device, None)
    moved = [batch.to(device) for batch in data]
    itself = [bytes_of((batch.dense, batch.label, batch.sparse.values(), batch.sparse.lengths())) for batch in moved]
    return [size + distributed for size, distributed in zip(itself, distributed_bytes(sharded, moved), strict=True)]


def show(plan: str, ahead: int, everyone: list[Any], serial: float, on_gpu: bool) -> Figure:
    """Print a plan's line on rank 0, and return its figure."""
    ratios = [extra / allowed for more, behind in everyone for extra, allowed in zip(more, behind, strict=True)]
    low, high = quartiles(ratios)
    if dist.get_rank() == 0:
        more, behind = everyone[0]
        print(
            f"{plan:<18} {ahead} batches ahead: {statistics.median(more) / 1e6:7.3f} MB over serial's"
            f" {serial / 1e6:.3f}; these batches {statistics.median(behind) / 1e6:7.3f}; maximum ratio"
            f" {max(ratios):.3f} ({low:.3f} .. {high:.3f}), aim at most {LIMIT}",
            flush=True,
        )
    name = f"recsys live bytes over serial, {plan} / batches ahead x bytes of a batch" + " (cuda)" * on_gpu
    return at_most(name, max(ratios), LIMIT, (low, high))


if __name__ == "__main__":
    main()
