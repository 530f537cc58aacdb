"""Lightning's fit loop with exact resume: a run continues with the batch after the last one trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipe._compat.lightning import (
    FitLoop,
    Loop,
    copy_as_subclass,
    get_combined_loader,
    has_val_time_interval,
    hide_loop_dataloaders,
    is_accumulating,
    set_sampler_epoch,
)
from lightning_pipe._compat.logged_values import (
    get_logged_values_state,
    reshard_logged_values,
    restore_logged_values,
    step_lr_schedulers_and_reset_results,
)
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, gather_objects_on_first_rank
from lightning_pipe.loops.data.random_streams import RNGStates, get_rng_states, set_rng_states
from lightning_pipe.loops.data.resumable_loader import (
    can_make_resumable,
    get_epoch_end_loader_state,
    loaders_share_sampler_state,
    make_resumable,
    was_made_resumable,
)
from lightning_pipe.loops.data.resume import ResumePoint, are_equal, load_state_on_all_ranks
from lightning_pipe.loops.data.shared_order import reshard_loader_states
from lightning_pipe.loops.data.stateful_loaders import track_iterators

_KEY = "lightning_pipe"


class PipelineFitLoop(FitLoop):
    """Drop-in replacement for Lightning's fit loop, around :class:`~lightning_pipe.loops.PipelineTrainingEpochLoop`.

    A checkpoint holds the positions of every rank's loaders and random generators after the last batch trained,
    regardless of how many batches were prefetched. PyTorch's loaders over map-style datasets get a state for this
    purpose; loaders with a ``state_dict`` use their own.
    """

    # States of the random generators before the first iterators were created.
    _before_data: RNGStates | None = None
    # Epoch in which the run that wrote the checkpoint created its loaders.
    _loaded_in: int | None = None
    # Resume point at which the loaders have been placed.
    _placed: ResumePoint | None = None
    # Logged values of a loaded checkpoint for this rank, until the run continues with them.
    _logged: dict[str, Any] | None = None
    _has_logged = False
    # Of each loader of the current epoch, whether this package made it resumable.
    _made_resumable: Sequence[bool] = ()
    # During setup_data: the loaders that are replaced.
    _loader_before: CombinedLoader | None = None

    @classmethod
    def install(cls, trainer: pl.Trainer) -> PipelineFitLoop:
        """Replace the trainer's fit loop by an instance with the same attributes, and return it."""
        trainer.fit_loop = loop = copy_as_subclass(trainer.fit_loop, cls)
        return loop

    @property
    def reloaded_since_resumption(self) -> bool:
        """True if this process, not the run that wrote the checkpoint, created the loaders of the current epoch."""
        epoch, last = self.trainer.current_epoch, self._last_train_dl_reload_epoch
        return epoch > 0 and last == epoch != self._loaded_in

    @property
    def restarting(self) -> bool:
        """True if the loop resumes an epoch in which a checkpoint was written."""
        return bool(Loop.restarting.fget(self))  # type: ignore[attr-defined]

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        # With max_steps, Lightning also sets this after a finished epoch, and then skips batches of the next one.
        current: Any = self.epoch_progress.current
        finished = current.ready == current.started == current.processed
        Loop.restarting.fset(self, restarting and not finished)  # type: ignore[attr-defined]

    def on_run_start(self) -> None:
        # Lightning does this unless max_steps is given.
        self.epoch_progress.current.completed = self.epoch_progress.current.processed  # type: ignore[attr-defined]
        super().on_run_start()

    def reset(self) -> None:
        """Prepare to train, with the logged values of the checkpoint if the run continues from one.

        Raises:
            SetupError: the checkpoint's logged values are damaged. Raised on every rank.
        """
        self._restore_logged()
        epochs: Any = self.epoch_progress.current
        if self._has_logged and epochs.completed < epochs.processed == epochs.started == epochs.ready:
            step_lr_schedulers_and_reset_results(self.epoch_loop)  # the checkpoint was written before
        self.update_restart_stage()
        # Lightning counts an epoch as ended once its last batch has ended; this loop first runs the end of the epoch.
        if not (self.restarted_mid_epoch and getattr(self.epoch_loop, "restarted_at_last_batch", False)):
            super().reset()
        self._convert_progress_to_current_ranks()

    @property
    def done(self) -> bool:
        """True after the last epoch. A run that resumes in an epoch that ``max_steps`` has ended does what is due."""
        epochs: Any = self.epoch_progress.current
        at_last_step = self.restarting and self.epoch_loop.global_step == self.max_steps
        if at_last_step and epochs.started > epochs.processed and epochs.processed != self.max_epochs:
            return bool(self.max_batches == 0 or self.trainer.should_stop)
        return super().done

    @property
    def skip(self) -> bool:
        """True if there is nothing to train. Lightning asks this once a run, and then leaves it without a reset."""
        skips = super().skip
        if skips:
            self._restore_logged()
        return skips

    def _restore_logged(self) -> None:
        # Not earlier in a run, since Lightning resets the values after the sanity check.
        logged, self._logged = self._logged, None
        self._has_logged = logged is not None
        if logged is not None:
            load_state_on_all_ranks(
                self._describe_checkpoint_part("logged values"), partial(restore_logged_values, self.epoch_loop, logged)
            )

    def _convert_progress_to_current_ranks(self) -> None:
        """Set the epoch's batch counts as if it had started on the current number of ranks, if it did not."""
        point, loader = self._resume_point, get_combined_loader(self)
        if point is None or not point.loaders or point.in_mid_epoch or loader is None:
            return
        if self.max_batches == float("inf"):
            return
        pairs = zip(loader.flattened, point.loaders, strict=True)
        # The last rank has the fewest remaining batches.
        left = [
            len(dataloader._indices.build_remaining_batches(state | {"rank": state["world"] - 1}))
            for dataloader, state in pairs
            if was_made_resumable(dataloader) and state and "left" in state
        ]
        if left:
            current: Any = self.epoch_loop.batch_progress.current
            more = int(self.max_batches) - max(left) - current.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, getattr(current, name) + more)

    def on_advance_start(self) -> None:
        point = self._resume_point
        if point is not None and point.loaders and not point.in_mid_epoch:
            # Reloaded loaders and hooks draw the same random numbers as in the previous run.
            set_rng_states(point.common, self.trainer.strategy.root_device)
        super().on_advance_start()
        if self.restarted_mid_epoch:
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                # They set values of the trainer there, which are not in the checkpoint.
                swa = isinstance(callback, StochasticWeightAveraging) and self.trainer.current_epoch <= callback.swa_end
                if swa or isinstance(callback, GradientAccumulationScheduler):
                    callback.on_train_epoch_start(self.trainer, self.trainer.lightning_module)

    def on_advance_end(self) -> None:
        if self._has_logged:
            # Lightning would not update schedulers that monitor a value at the end of a resumed epoch.
            self.restarting = False
        super().on_advance_end()

    def teardown(self) -> None:
        """Keep the last position for later checkpoints, and release the dataloaders' iterators."""
        try:
            # Before Lightning closes the loaders: for its last state, torchdata's loader would start workers again.
            self.epoch_loop.end_training()  # type: ignore[attr-defined]
        finally:
            super().teardown()

    def setup_data(self) -> None:
        """Create the dataloaders, at the checkpoint's positions if a run continues.

        Ranks use the smallest number of batches of any rank.

        Raises:
            SetupError: the checkpoint does not fit the dataloaders. Raised on every rank.
        """
        fetcher, point, before = self._data_fetcher, self._resume_point, get_combined_loader(self)
        self._loader_before = before
        if before is None:
            self._before_data = get_rng_states(self.trainer.strategy.root_device)
        if point is None or point is self._placed:
            self._set_up_data()
        else:
            self._placed = point
            with point.replay_iterator_creation(self.trainer.strategy.root_device):
                if before is None:
                    self._set_up_data()
                else:
                    self._resume_existing_loaders(point, before)
            if self._loaded_in is not None:
                # The loaders are then reloaded in the same epochs as in the previous run.
                self._last_train_dl_reload_epoch = self._loaded_in
        if self._data_fetcher is not fetcher and self.trainer.world_size > 1 and dist.is_initialized():
            self._limit_to_shortest_rank()

    def _resume_existing_loaders(self, point: ResumePoint, loader: CombinedLoader) -> None:
        """Continue at the checkpoint's positions with loaders that were made before the checkpoint was read.

        ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` makes them.
        """
        self._loader_before = None
        self.epoch_loop.record_epoch_start(None)  # type: ignore[attr-defined]
        self._load_loader_states(point, loader)
        iter(self._data_fetcher)  # type: ignore[arg-type]

    def _set_up_data(self) -> None:
        try:
            super().setup_data()
        except BaseException:
            # Lightning's teardown asks the fetcher for its length. Without iterators that raises an error, which would
            # hide this one.
            if (loader := get_combined_loader(self)) is not None and self._data_fetcher is not None:
                loader.reset()
                self._data_fetcher = None
            raise

    def _limit_to_shortest_rank(self) -> None:
        """Use the smallest number of batches of any rank on all ranks, for validation and the end of the epoch."""
        trainer: Any = self.trainer
        if (shortest := min(all_gather_objects(self.max_batches, dist.group.WORLD))) == self.max_batches:
            return
        self.max_batches = shortest
        if isinstance(trainer.val_check_interval, float) and not has_val_time_interval(trainer):
            trainer.val_check_batch = max(1, int(shortest * trainer.val_check_interval))

    def _load_combined_loader_states(self) -> None:
        loader = get_combined_loader(self)
        assert loader is not None
        loader.flattened = [
            make_resumable(dataloader) if can_make_resumable(dataloader) else dataloader
            for dataloader in loader.flattened
        ]
        self._made_resumable = [was_made_resumable(dataloader) for dataloader in loader.flattened]
        track_iterators(loader)
        self._load_loader_states(self._resume_point, loader)

    def _load_loader_states(self, point: ResumePoint | None, loader: CombinedLoader) -> None:
        # Lightning sets the epoch after the iterators are created, when their workers have already read the sampler.
        epochs: Any = self.epoch_progress.current
        for dataloader in loader.flattened:
            set_sampler_epoch(dataloader, epochs.processed)
        if point is not None:
            # Either every rank has a resume point or no rank has.
            load_state_on_all_ranks(
                self._describe_checkpoint_part("data"), partial(self._load_resume_point_into_loaders, point, loader)
            )
            if point.loaders:
                return
        self._combined_loader_states_to_load = self._match_lightning_loader_states(loader)
        super()._load_combined_loader_states()
        if point is None:
            self.epoch_loop.record_epoch_start(loader)  # type: ignore[attr-defined]

    def _load_resume_point_into_loaders(self, point: ResumePoint, loader: CombinedLoader) -> None:
        if not point.loaders and not point.in_mid_epoch:
            return
        self._combined_loader_states_to_load = []
        if self._loader_before is not None:
            _exempt_new_loaders_from_resume(point, self._loader_before, loader)
        point.load_into_loaders(loader)
        if point.loaders and self._loader_before is None:
            # The user's code has drawn its random numbers for the loaders by now. With the same seed, a random split is
            # therefore that of the previous run.
            point.restore_generators(self.trainer.strategy.root_device)

    def _match_lightning_loader_states(self, loader: CombinedLoader) -> list[dict[str, Any]]:
        """Loader states from Lightning's own loop, which only has those of the user's stateful loaders.

        Loaders that this package made resumable get an empty state.
        """
        states = iter(self._combined_loader_states_to_load)
        if not self._combined_loader_states_to_load:
            return []
        stateful = [dataloader for dataloader in loader.flattened if hasattr(dataloader, "state_dict")]
        return [{} if was_made_resumable(dataloader) else next(states, {}) for dataloader in stateful]

    @property
    def _resume_point(self) -> ResumePoint | None:
        point: ResumePoint | None = getattr(self.epoch_loop, "resume_point", None)
        return point

    def on_save_checkpoint(self) -> dict[str, Any]:
        # Lightning would ask the loaders for their states. torchdata's loaders create an iterator for that, which draws
        # random numbers.
        with hide_loop_dataloaders(self):
            state: dict[str, Any] = super().on_save_checkpoint()
        point = self.epoch_loop.make_resume_point()  # type: ignore[attr-defined]
        if point is None:
            # Before the first epoch: the loaders start from the beginning.
            if (before := self._before_data) is not None:
                state[_KEY] = {"ranks": self._gather_rank_states(ResumePoint([], before))}
            return state
        if is_accumulating(self.epoch_loop) and self.trainer.lightning_module.automatic_optimization:
            ready = self.epoch_loop.batch_progress.current.ready
            rank_zero_warn(
                f"A checkpoint is written after {ready} batches of an epoch, in the middle of an accumulation"
                f" of {self.trainer.accumulate_grad_batches}: it does not contain the gradients of the batches since"
                " the last optimizer step, so a run that resumes from it is not exact. Save after optimizer steps. Let"
                " a resumed run write to a folder of its own, because it may save before its first step"
            )
        # The loaders are gone if the trainer has validated or predicted since.
        pairs = zip(point.loaders, self._made_resumable, strict=bool(point.loaders))
        user_states = [loader_state for loader_state, made_resumable in pairs if not made_resumable]
        if stateful := [loader_state for loader_state in user_states if loader_state is not None]:
            state["combined_loader"] = stateful  # Lightning's own loop reads this key
        # An unfinished validation restarts from the beginning and draws the same random numbers.
        due = getattr(self.epoch_loop.val_loop, "rng_states_at_start", None)
        if due is not None:
            point = replace(point, common=due)
        state[_KEY] = {
            "ranks": self._gather_rank_states(point),
            "validation_due": due is not None or self.epoch_loop.validation_due,  # type: ignore[attr-defined]
            "loaded_in": self._last_train_dl_reload_epoch,
            "ended_batches": self.epoch_loop.ended_batches,  # type: ignore[attr-defined]
        }
        return state

    def _gather_rank_states(self, point: ResumePoint) -> list[dict[str, Any]]:
        """States of all ranks on the first rank, and of this rank on the others."""
        return gather_objects_on_first_rank(
            {**point.packed(), "logged": get_logged_values_state(self.epoch_loop)}, dist.group.WORLD
        )

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Load the positions of the loops and of this rank's data, and the states of its random generators.

        If another number of ranks wrote the checkpoint, the rest of the epoch is divided over the current ranks where
        the sampler allows that. Otherwise the data restart from the beginning, with a warning.

        Raises:
            SetupError: the state is damaged. Raised on every rank.
        """
        load_state_on_all_ranks(
            self._describe_checkpoint_part("loops and data"), partial(super().load_state_dict, state_dict, prefix)
        )

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._load_rank_state(state_dict.get(_KEY, {}))

    def _describe_checkpoint_part(self, part: str) -> str:
        path = self.trainer.ckpt_path
        checkpoint = "the checkpoint" if path is None else f"the checkpoint {str(path)!r}"
        return f"the state of rank {self.trainer.global_rank}'s {part} in {checkpoint}"

    def _load_rank_state(self, saved: Any) -> None:
        ranks = saved.get("ranks")
        self.epoch_loop.ended_batches = saved.get("ended_batches")  # type: ignore[attr-defined]
        self._logged = None
        if ranks is None:
            return
        self.epoch_loop.validation_due = bool(saved.get("validation_due"))  # type: ignore[attr-defined]
        self._loaded_in = saved.get("loaded_in")
        world, rank = self.trainer.world_size, self.trainer.global_rank
        if len(ranks) != world:
            first = ranks[0]
            if getattr(self.trainer.strategy, "all_ranks_share_data", False) and all(
                are_equal(state["loaders"], first["loaders"]) for state in ranks
            ):
                # All ranks read the same batches, in the previous run and in this one.
                ranks, world, rank = [first], 1, 0
        self._logged = reshard_logged_values(rank, world, [state["logged"] for state in ranks])
        if len(ranks) != world:
            elsewhere = reshard_loader_states(ranks[0]["loaders"], rank, world)
            if elsewhere is not None:
                common = get_rng_states(self.trainer.strategy.root_device)
                self.epoch_loop.resume_point = ResumePoint(elsewhere, common)  # type: ignore[attr-defined]
                return
            rank_zero_warn(
                f"The checkpoint was written by {len(ranks)} rank(s), and this run has {world}, which cannot divide the"
                " rest of the epoch: the data restart from the beginning, while the batch count continues. Use a"
                " DistributedSampler, which has one order for all ranks, or save at the end of an epoch"
            )
            return
        self.epoch_loop.resume_point = ResumePoint.from_packed(ranks[rank])  # type: ignore[attr-defined]


def _exempt_new_loaders_from_resume(point: ResumePoint, before: CombinedLoader, reloaded: CombinedLoader) -> None:
    """Let newly created loaders and samplers start from their current state; those that existed before continue."""
    if len(reloaded.flattened) != len(point.loaders):
        return
    for place, (previous_loader, reloaded_loader) in enumerate(zip(before.flattened, reloaded.flattened, strict=True)):
        if (
            was_made_resumable(previous_loader)
            and was_made_resumable(reloaded_loader)
            and not loaders_share_sampler_state(previous_loader, reloaded_loader)
        ):
            point.loaders[place] = get_epoch_end_loader_state(reloaded_loader)
        elif previous_loader is not reloaded_loader and not was_made_resumable(reloaded_loader):
            point.loaders[place] = None
            point.iterators[place : place + 1] = [None] * bool(point.iterators)
