"""Mutation tests: handwritten one-line faults, each of which a given test must detect.

    python scripts/faults.py                   # all faults, takes some minutes
    python scripts/faults.py ledger exchanges  # faults of files whose names contain one of these words

The tree is copied to a temporary folder, where the tests must pass. Then each fault is inserted, its test is run, and
the file is restored. Exits with status 1 if a fault survives or if a test fails without a fault. If the code of an
entry does not occur exactly once in its file, the script stops: change the entry together with the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Time limit of a test in seconds, for faults that make it hang.
TIMEOUT = 600


class Fault(NamedTuple):
    """A replacement of code.

    Attributes:
        file: path below ``lightning_pipe/``.
        original: code that occurs exactly once in the file.
        faulty: faulty code that replaces it.
        test: file or test below ``tests/`` that must fail.
    """

    file: str
    original: str
    faulty: str
    test: str


FAULTS = [
    Fault(
        "pipe/gradients.py",
        "elif key in self._unshared and total.layout",
        "elif total.layout",
        "pipe/test_gradients.py::test_parameters_that_are_added_have_their_own_gradients_over_micro_batches",
    ),
    Fault(
        "pipe/gradients.py",
        "elif key in self._unshared and total.layout",
        "elif total.layout",
        "pipe/test_gradients.py::test_a_first_gradient_that_another_parameter_shares_stays_as_it_is",
    ),
    Fault("pipe/gradients.py", "gradient + total if dense_last else ", "", "pipe/test_gradients.py"),
    Fault(
        "engine/planning/contiguous_partition.py",
        "if most_even else [-end, *ends]",
        "if most_even else [end, *ends]",
        "engine/planning/test_contiguous_partition.py",
    ),
    Fault(
        "loops/data/resumable_loader.py",
        'self._left, self.returned = resume, resume["given"]',
        'self._left, self.returned = resume, resume["given"] + (resume["given"] > 0)',
        "loops/data/test_shared_order.py::test_a_rank_continues_again_and_again_where_its_share_was_left",
    ),
    Fault(
        "loops/data/resumable_loader.py",
        'self._left, self.returned = resume, resume["given"]',
        'self._left, self.returned = resume, resume["given"] + (resume["given"] > 0)',
        "loops/data/test_shared_order.py::test_trainers_on_2_3_and_1_ranks_train_an_epoch_together",
    ),
    Fault(
        "loops/data/resumable_loader.py",
        'left = self._left | {"given": self.returned, "order": order}',
        'left = self._left | {"given": 0, "order": order}',
        "loops/data/test_shared_order.py::test_a_rank_continues_again_and_again_where_its_share_was_left",
    ),
    Fault(
        "loops/data/shared_order.py",
        'trained = order.get("trained", 0) + ',
        "trained = ",
        "loops/data/test_shared_order.py::test_trainers_on_2_3_and_1_ranks_train_an_epoch_together",
    ),
    Fault("loops/data/ledger.py", "self._to_transfer.clear()", "pass", "loops/data/test_ledger.py"),
    Fault(
        "recsys/dense/dense_reduction.py",
        "pending_works, self._pending_works = self._pending_works, []",
        "pending_works, self._pending_works = [], []",
        "recsys/dense/test_dense_reduction.py::test_reductions_left_over_are_waited_for_before_the_next_step_uses_their_memory",
    ),
    Fault(
        "recsys/tasks/actions.py",
        "discard_ahead(ahead)\n        self._tables_in_training = False",
        "discard_ahead(ahead)",
        "recsys/tasks/test_task_list.py::test_after_a_batch_is_abandoned_in_mid_training_the_next_lookup_brings_learning_rates_again",
    ),
    Fault(
        "engine/ranks/gloo_all_to_all.py",
        "_wait(works, timeout)\n        return",
        "pass\n        return",
        "engine/ranks/test_gloo_all_to_all.py::test_those_that_nobody_waits_for_have_ended_before_their_memory_is_freed",
    ),
    Fault(
        "engine/runtime/executor.py",
        "plan.pipeline_depth + longest",
        "plan.pipeline_depth",
        "engine/runtime/test_executor.py",
    ),
    Fault(
        "engine/runtime/executor.py",
        "self._get_slot_of_iteration(slot.iteration - distance).done",
        "self._get_slot_of_iteration(slot.iteration).done",
        "engine/runtime/test_executor.py::test_a_task_waits_for_a_worker_at_an_earlier_iteration",
    ),
    Fault(
        "engine/planning/plan_choice.py",
        "_CHANCE / max(1, generated)",
        "_CHANCE",
        "engine/planning/test_planner.py::test_few_rounds_prove_nothing_and_the_more_plans_the_less",
    ),
    Fault(
        "engine/planning/plan_choice.py",
        "for name in measured))",
        "for name in running))",
        "engine/planning/test_planner.py::test_plans_that_have_dropped_out_share_in_the_level_too",
    ),
    Fault(
        "llm/run/optimizer_offload.py",
        "self._finish_copies()\n        self._restrict_param_groups",
        "pass\n        self._restrict_param_groups",
        "llm/run/test_optimizer_offload.py::test_the_state_is_on_the_host_whole_when_a_step_returns",
    ),
    Fault(
        "llm/run/optimizer_offload.py",
        "self._to_host)\n        self._finish_copies()",
        "self._to_host)",
        "llm/run/test_optimizer_offload.py::test_state_that_is_moved_off_the_device_is_on_the_host_whole",
    ),
    # Faults that a mutation tester found.
    Fault(
        "loops/data/random_streams.py",
        "torch.randint(2**63 - 1, ()",
        "torch.randint(1, ()",
        "loops/data/test_random_streams.py::test_no_two_streams_draw_the_same_and_each_draws_what_the_seed_says",
    ),
    Fault(
        "loops/data/random_streams.py",
        "if len(self._streams) == 1:",
        "if len(self._streams) >= 1:",
        "loops/data/test_random_streams.py::test_no_two_streams_draw_the_same_and_each_draws_what_the_seed_says",
    ),
    Fault(
        "pipe/partition.py",
        "enter_layer(self.first_layer + len(self.layers))",
        "enter_layer(self.first_layer * len(self.layers))",
        "pipe/test_randomness.py::test_a_loss_draws_the_same_however_layers_are_shared_out_and_not_what_a_layer_draws",
    ),
    Fault(
        "recsys/dynamic/store/row_files.py",
        "zlib.crc32(content)) != entry.crc32",
        "zlib.crc32(content)) > entry.crc32",
        "recsys/dynamic/store/test_row_files.py",
    ),
    Fault(
        "recsys/dynamic/cache/row_cache.py",
        "step - open_steps[0] > ttl:",
        "step - open_steps[0] != ttl:",
        "recsys/dynamic/cache/test_row_cache.py",
    ),
    Fault(
        "recsys/dynamic/tables/sharded_tables.py",
        "        record_stream(slots)\n",
        "",
        "scenarios/streams/test_recsys_streams.py::test_nothing_is_found_under_any_plan",
    ),
    Fault(
        "pipe/copies.py",
        "stream.wait_event(event)  # (2)",
        "pass",
        "scenarios/streams/test_pipe_streams.py",
    ),
]


def main(words: Sequence[str]) -> int:
    """Try the faults of files whose names contain one of the words (default: all), and return the exit status."""
    faults = [fault for fault in FAULTS if not words or any(word in fault.file for word in words)]
    for fault in faults:
        if (times := (ROOT / "lightning_pipe" / fault.file).read_text().count(fault.original)) != 1:
            raise SystemExit(f"{fault.file} has {fault.original!r} {times} times, expected once. Change the entry")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "_build"))
        for test in dict.fromkeys(fault.test for fault in faults):
            if not _passes(tree, test):
                failed += 1
                print(f"FAILS     {test}: without a fault", flush=True)
        for fault in faults:
            path = tree / "lightning_pipe" / fault.file
            code = path.read_text()
            path.write_text(code.replace(fault.original, fault.faulty))
            survived = _passes(tree, fault.test)
            path.write_text(code)
            failed += survived
            print(
                f"{'SURVIVED' if survived else 'killed':9} {fault.file}: {fault.faulty.strip()!r}, by {fault.test}",
                flush=True,
            )
    print(f"{len(faults)} faults, {failed} failures")
    return int(failed > 0)


def _passes(tree: Path, test: str) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{test}"]
    try:
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return False
    if ended.returncode > 1:  # the test does not exist or cannot be collected
        raise SystemExit(f"pytest ended with status {ended.returncode} for {test}:\n{ended.stdout.decode()}")
    return ended.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
