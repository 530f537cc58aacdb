"""Lightning's fit loop, which goes on from a checkpoint with the batch behind the last one trained.

Tested in ``tests/loops/test_training_epoch_loop.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipe._compat.lightning import FitLoop, Loop, set_sampler_epoch
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.safe_text import printable, shown
from lightning_pipe.engine.ranks.together import gather, gather_to_first
from lightning_pipe.loops.data.random_streams import States, get_states, set_states
from lightning_pipe.loops.data.resumable_loader import (
    can_resume,
    end_of_epoch,
    is_resumable,
    resumable,
    share_samplers,
)
from lightning_pipe.loops.data.resume import ResumePoint, read_on_all_ranks
from lightning_pipe.loops.data.shared_order import of_other_ranks
from lightning_pipe.loops.data.stateful_loaders import watch

_KEY = "lightning_pipe"


class PipelineFitLoop(FitLoop):
    """Drop-in for Lightning's fit loop, around :class:`~lightning_pipe.loops.PipelineTrainingEpochLoop`.

    A checkpoint says where every rank's loaders and random generators were behind the last batch trained, however many
    were fetched ahead. PyTorch's own loaders over map-style datasets are given a state for it; loaders with a
    ``state_dict`` keep theirs.
    """

    # Where the generators were before the first iterators were made.
    _before_data: States | None = None
    # Epoch in which the run of the checkpoint that is continued from had made its loaders.
    _loaded_in: int | None = None
    # While loaders are set up: those that they replace.
    _loader_before: CombinedLoader | None = None

    @classmethod
    def install(cls, trainer: pl.Trainer) -> PipelineFitLoop:
        """Put one in the place of the trainer's, with all that the latter holds."""
        present = trainer.fit_loop
        if isinstance(present, cls):
            return present
        loop = cls.__new__(cls)
        loop.__dict__.update(present.__dict__)
        trainer.fit_loop = loop
        return loop

    @property
    def reloaded_since_resumption(self) -> bool:
        """Whether this process has made the present epoch's loaders, not the run that is continued."""
        epoch, last = self.trainer.current_epoch, self._last_train_dl_reload_epoch
        return epoch > 0 and last == epoch != self._loaded_in

    @property
    def restarting(self) -> bool:
        """Whether an epoch is gone on with that a checkpoint was written in."""
        found: bool = self._restarting
        return found

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        # Lightning's says so of every epoch where max_steps is given, and leaves batches of the next one out.
        current: Any = self.epoch_progress.current
        finished = current.ready == current.started == current.processed
        Loop.restarting.fset(self, restarting and not finished)  # type: ignore[attr-defined]

    def on_run_start(self) -> None:
        # Lightning does so unless max_steps is given.
        self.epoch_progress.current.completed = self.epoch_progress.current.processed  # type: ignore[attr-defined]
        super().on_run_start()

    def reset(self) -> None:
        self.update_restart_stage()
        # Lightning counts an epoch as ended whose last batch ended; here it ends first.
        if not (self.restarted_mid_epoch and getattr(self.epoch_loop, "restarted_at_last_batch", False)):
            super().reset()
        self._count_in_batches_of_these_ranks()

    def _count_in_batches_of_these_ranks(self) -> None:
        """Count the epoch's batches as if these ranks had trained it from its beginning, where others had begun it."""
        point = self._resume_point
        if point is None or not point.loaders or point.in_mid_epoch or self._combined_loader is None:
            return
        if self.max_batches == float("inf"):
            return
        pairs = zip(self._combined_loader.flattened, point.loaders, strict=True)
        # The rank that has the fewest of what is left is the last one.
        left = [
            len(one._indices.batches_left(state | {"rank": state["world"] - 1}))
            for one, state in pairs
            if is_resumable(one) and state and "left" in state
        ]
        if left:
            current: Any = self.epoch_loop.batch_progress.current
            more = int(self.max_batches) - max(left) - current.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, getattr(current, name) + more)

    def on_advance_start(self) -> None:
        point = self._resume_point
        if point is not None and point.loaders and not point.in_mid_epoch:
            # Loaders that are reloaded, and hooks, draw as in the run before.
            set_states(point.common, self.trainer.strategy.root_device)
        super().on_advance_start()

    def setup_data(self) -> None:
        fetcher, point, before = self._data_fetcher, self._resume_point, self._combined_loader
        self._loader_before = before
        if before is None:
            self._before_data = get_states(self.trainer.strategy.root_device)
        if point is None or before is not None:
            self._set_up_data()
        else:
            with point.making_iterators(self.trainer.strategy.root_device):
                self._set_up_data()
            if self._loaded_in is not None:
                # So that they are reloaded in the same epochs.
                self._last_train_dl_reload_epoch = self._loaded_in
        if self._data_fetcher is not fetcher and self.trainer.world_size > 1 and dist.is_initialized():
            self._count_as_the_shortest()

    def _set_up_data(self) -> None:
        try:
            super().setup_data()
        except BaseException:
            # Lightning's teardown asks a fetcher without iterators for its length, and that error is the one shown.
            if self._combined_loader is not None and self._data_fetcher is not None:
                self._combined_loader.reset()
                self._data_fetcher = None
            raise

    def _count_as_the_shortest(self) -> None:
        """Let all ranks validate, and end, where the one with the fewest batches does."""
        trainer: Any = self.trainer
        if (found := min(gather(self.max_batches, dist.group.WORLD))) == self.max_batches:
            return
        self.max_batches = found
        if isinstance(trainer.val_check_interval, float) and trainer._val_check_time_interval is None:
            trainer.val_check_batch = max(1, int(found * trainer.val_check_interval))

    def _load_combined_loader_states(self) -> None:
        loader = self._combined_loader
        assert loader is not None
        loader.flattened = [resumable(one) if can_resume(one) else one for one in loader.flattened]
        watch(loader)
        # Lightning sets it when the iterators are there already, whose workers have read the sampler by then.
        epochs: Any = self.epoch_progress.current
        for one in loader.flattened:
            set_sampler_epoch(one, epochs.processed)
        point = self._resume_point
        if point is not None:
            # Every rank has one, or none has.
            what = self._named("data")
            read_on_all_ranks(what, partial(self._load_states_of, point, loader))
            if point.loaders:
                if self._loader_before is None:
                    # What the user's code draws for loaders, it draws before: a split is that of the run before where
                    # both are seeded alike.
                    point.put_generators(self.trainer.strategy.root_device)
                return
        self._combined_loader_states_to_load = self._states_for_lightning(loader)
        super()._load_combined_loader_states()
        if point is None:
            self.epoch_loop.note_beginning(loader)  # type: ignore[attr-defined]

    def _load_states_of(self, point: ResumePoint, loader: CombinedLoader) -> None:
        if not point.loaders and not point.in_mid_epoch:
            return
        self._combined_loader_states_to_load = []
        if self._loader_before is not None:
            _keep_new_samplers(point, self._loader_before, loader)
        point.load(loader)

    def _states_for_lightning(self, loader: CombinedLoader) -> list[dict[str, Any]]:
        """States that Lightning's own loop saved: of the users' stateful loaders only; ours get none."""
        states = iter(self._combined_loader_states_to_load)
        if not self._combined_loader_states_to_load:
            return []
        stateful = [one for one in loader.flattened if hasattr(one, "state_dict")]
        return [{} if is_resumable(one) else next(states, {}) for one in stateful]

    @property
    def _resume_point(self) -> ResumePoint | None:
        found: ResumePoint | None = getattr(self.epoch_loop, "resume_point", None)
        return found

    def on_save_checkpoint(self) -> dict[str, Any]:
        # Lightning would ask the loaders, of which torchdata's make an iterator for their state, and draw for it.
        loader = self._combined_loader
        vars(self)["_combined_loader"] = None
        try:
            state: dict[str, Any] = super().on_save_checkpoint()
        finally:
            vars(self)["_combined_loader"] = loader
        point = self.epoch_loop.point_of_last_trained()  # type: ignore[attr-defined]
        if point is None:
            # Before the first epoch: loaders begin at their beginning.
            if (before := self._before_data) is not None:
                state[_KEY] = {"ranks": gather_to_first(ResumePoint([], before).packed(), dist.group.WORLD)}
            return state
        progress = self.epoch_loop.batch_progress.current
        assert loader is not None
        if progress.ready and self.trainer.lightning_module.automatic_optimization and self._should_accumulate():
            rank_zero_warn(
                f"A checkpoint is written behind {progress.ready} batches of an epoch, in the middle of an accumulation"
                f" of {self.trainer.accumulate_grad_batches}: gradients of the batches since the last step are not in"
                " it. Write it where the optimiser has stepped"
            )
        pairs = zip(point.loaders, loader.flattened, strict=bool(point.loaders))
        own = [one for one, of in pairs if not is_resumable(of)]
        if stateful := [one for one in own if one is not None]:
            state["combined_loader"] = stateful  # where Lightning's own loop looks for them
        # A validation that is not over begins anew, and draws the same.
        due = getattr(self.epoch_loop.val_loop, "begun_with", None)
        if due is not None:
            point = replace(point, common=due)
        state[_KEY] = {
            "ranks": gather_to_first(point.packed(), dist.group.WORLD),
            "validation_due": due is not None or self.epoch_loop.validation_due,  # type: ignore[attr-defined]
            "loaded_in": self._last_train_dl_reload_epoch,
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        try:
            super().load_state_dict(state_dict, prefix)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SetupError(
                f"The loops' positions in {self._checkpoint} are damaged ({type(error).__name__}:"
                f" {printable(str(error)[:200])}). Resume from another checkpoint."
            ) from error

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        read_on_all_ranks(self._named("data and random generators"), lambda: self._load_own(state_dict.get(_KEY, {})))

    @property
    def _checkpoint(self) -> str:
        path = self.trainer.ckpt_path
        return "the checkpoint" if path is None else f"the checkpoint {str(path)!r}"

    def _named(self, part: str) -> str:
        return f"the state of rank {self.trainer.global_rank}'s {part} in {self._checkpoint}"

    def _load_own(self, own: Any) -> None:
        if not isinstance(own, dict):
            raise TypeError(f"expected ranks' states by their names, got {shown(own)}")
        ranks, loaded_in = own.get("ranks"), own.get("loaded_in")
        if ranks is None:
            return
        if not isinstance(ranks, list) or not ranks or not isinstance(loaded_in, int | None):
            raise TypeError(f"expected a state of each rank, got {shown(own)}")
        self.epoch_loop.validation_due = bool(own.get("validation_due"))  # type: ignore[attr-defined]
        self._loaded_in = loaded_in
        world, rank = self.trainer.world_size, self.trainer.global_rank
        if len(ranks) != world:
            first = ranks[0]
            if getattr(self.trainer.strategy, "ranks_share_data", False) and all(
                _are_equal(one["loaders"], first["loaders"]) for one in ranks
            ):
                # All ranks read the same batches, then as now.
                ranks, world, rank = [first], 1, 0
        if len(ranks) != world:
            elsewhere = of_other_ranks(ranks[0]["loaders"], rank, world)
            if elsewhere is not None:
                common = get_states(self.trainer.strategy.root_device)
                self.epoch_loop.resume_point = ResumePoint(elsewhere, common)  # type: ignore[attr-defined]
                return
            rank_zero_warn(
                f"The checkpoint was written by {len(ranks)} rank(s); there are {world}, which cannot share out what"
                " is left of the epoch: its data begin at their beginning, though batches are counted on. Only a"
                " DistributedSampler has one order for all ranks; or write the checkpoint at the end of an epoch"
            )
            return
        self.epoch_loop.resume_point = ResumePoint.unpacked(ranks[rank])  # type: ignore[attr-defined]


def _are_equal(one: Any, other: Any) -> bool:
    """True if two states of loaders are equal; those of users' loaders may hold tensors and arrays."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    same: Any = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _keep_new_samplers(point: ResumePoint, before: CombinedLoader, reloaded: CombinedLoader) -> None:
    """Let loaders and samplers that were made anew begin as they are; those that were there before continue."""
    if len(reloaded.flattened) != len(point.loaders):
        return
    for place, (old, new) in enumerate(zip(before.flattened, reloaded.flattened, strict=True)):
        if is_resumable(old) and is_resumable(new) and not share_samplers(old, new):
            point.loaders[place] = end_of_epoch(new)
        elif old is not new and not is_resumable(new):
            point.loaders[place] = None
            point.iterators[place : place + 1] = [None] * bool(point.iterators)
