"""Save and take up the state of a training: when, with what, and whether it fits the run that takes it up."""

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from coati_ext.checkpoint_io.state_manifest import checkpoints
from coati_ext.checkpoint_io.training_state import TrainingState, agree_on_training_state, save_training_state
from coati_ext.trainer.base import StepTrainer
from coati_ext.utils.launch import print_rank_0
from coati_ext.utils.preemption import PreemptionGuard
from coati_ext.utils.run_directory import STATES_DIR

# Flags that may differ between a run and its continuation without a word.
_FREE = {"save_dir", "tensorboard_dir", "config_file", "resume", "overwrite", "save_interval", "keep_last", "config"}
_FREE |= {"init_adapter"}


class StateKeeper:
    """Saves every `save_interval` steps, and at the step after which a signal asks to stop.

    Args:
        save_dir: of the run; states go to its folder checkpoints.
        settings: the run's resolved flags; a continuation is told which of them differ.
        data_fingerprint: of the data set; a continuation must have the same.

    Attributes:
        seconds: since it was made, and before the states that were taken up were saved.
    """

    def __init__(
        self,
        trainer: StepTrainer,
        *,
        save_dir: str | Path,
        settings: dict[str, Any],
        data_fingerprint: str,
        save_interval: int = 0,
        keep_last: int = 2,
    ):
        self.trainer, self.root = trainer, Path(save_dir) / STATES_DIR
        self.settings, self.data_fingerprint = settings, data_fingerprint
        self.save_interval, self.keep_last = save_interval, keep_last
        self.guard = PreemptionGuard()
        self.stopped_by: str | None = None
        self._start = time.perf_counter()

    def __enter__(self) -> "StateKeeper":
        self.guard.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.guard.__exit__(*exception)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def after_step(self, trainer: StepTrainer) -> bool:
        """The `after_step` of a trainer's `fit`: whether to stop."""
        stop = self.guard.requested(dist.group.WORLD)
        if stop and not hasattr(trainer.optimizer, "state_pieces"):
            self.stopped_by = "a signal"
            done = trainer.amount(trainer.step)
            print_rank_0(f"stopped by a signal after {done}; under this plugin no state can be saved")
        elif stop or (self.save_interval and trainer.step % self.save_interval == 0):
            directory = self.save()
            if stop:
                self.stopped_by = self.guard.received.name if self.guard.received else "a signal to another rank"
                print_rank_0(
                    f"stopped by {self.stopped_by} after {trainer.amount(trainer.step)}; state saved in {directory}; "
                    "go on with the same command and --resume latest"
                )
        return stop

    def save(self) -> Path:
        """Write the state of this moment; a collective."""
        trainer = self.trainer
        shared = {
            "settings": self.settings,
            "data_fingerprint": self.data_fingerprint,
            "resumes_with": {what: value for what, (value, _) in trainer.resumes_with.items()},
            "num_steps": trainer.num_steps,
            "seconds": self.seconds,
            "trainer": trainer.shared_state(),
            "lr_schedule_position": trainer.lr_scheduler.last_epoch,
            **trainer.optimizer.shared_state(),
        }
        return save_training_state(
            self.root,
            trainer.step,
            pieces=trainer.optimizer.state_pieces(),
            rank_state={**random_states(), "trainer": trainer.rank_state()},
            shared_state=shared,
            keep_last=self.keep_last,
            group=dist.group.WORLD,
        )

    def resume(self, which: str) -> bool:
        """Take up the state `which`: "latest" of this run's directory, a state's directory, or another run's.

        Returns:
            Whether there was one; only "latest" may find none, and training then begins at the start.

        Raises:
            ValueError: it is damaged, or of another model, adapter, data set or global batch.
        """
        root = Path(which) / STATES_DIR
        root, which = (root, "latest") if which != "latest" and root.is_dir() else (self.root, which)
        saved = agree_on_training_state(root, dist.group.WORLD, which=which)
        if saved is None:
            self.start()
            print_rank_0(f"no state in {root} to resume from: training begins at the start")
            return False
        self._check(saved)
        trainer = self.trainer
        trainer.optimizer.load_state(saved)
        _set_position(trainer.lr_scheduler, saved.shared_state["lr_schedule_position"])
        trainer.step = saved.step
        self._start -= saved.shared_state.get("seconds", 0.0)  # not in states of older versions
        trainer.load_shared_state(saved.shared_state["trainer"])
        own = saved.rank_state(dist.get_rank())
        trainer.load_rank_state(None if own is None else own["trainer"])
        if own is not None:
            restore_random_states(own)
        done, all_of_them = trainer.amount(saved.step), trainer.amount(trainer.num_steps)
        print_rank_0(f"resumed from {saved.directory}: {done} are done, of {all_of_them}")
        return True

    def start(self) -> None:
        """Begin at the start.

        Raises:
            ValueError: an earlier run's states are there, which a later `--resume latest` would take for this run's.
        """
        earlier = checkpoints(self.root)
        if earlier:
            raise ValueError(
                f"{self.root} has states of an earlier run ({earlier[0].name}): go on with --resume latest, or give "
                "another --save_dir"
            )

    def _check(self, saved: TrainingState) -> None:
        then = saved.shared_state
        if then["data_fingerprint"] != self.data_fingerprint:
            raise ValueError(
                f"{saved.directory} was saved with other samples: the data position means nothing here. Give the same "
                "data files, --max_length and tokenizer, or start from its adapter with --init_adapter"
            )
        wanted = {**self.trainer.resumes_with, "seed": (self.settings["seed"], "--seed")}
        for what, (now, flags) in wanted.items():
            before = then["settings"]["seed"] if what == "seed" else then["resumes_with"].get(what)
            if before != now:
                raise ValueError(
                    f"{saved.directory} was saved with {what} {before}, this run has {now}: the data order would be "
                    f"another. Give the same {flags}"
                )
        if saved.step > self.trainer.num_steps:
            raise ValueError(
                f"{saved.directory}: {self.trainer.amount(saved.step)} are done, and this run ends after "
                f"{self.trainer.amount(self.trainer.num_steps)}; give more {self.trainer.LENGTH_FLAGS}"
            )
        changed = {
            key: (then["settings"].get(key), value)
            for key, value in self.settings.items()
            if key not in _FREE and then["settings"].get(key) != value
        }
        if changed:
            shown = ", ".join(f"--{key} {before} -> {after}" for key, (before, after) in changed.items())
            print_rank_0(f"resumed with other flags than saved: {shown}")


def _set_position(schedule: LRScheduler, position: int) -> None:
    """With the rates of this run's schedule, which may be another than the saved one: its last step is done again."""
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": position - 1, "_step_count": 0})
    schedule.step()


def random_states() -> dict[str, Any]:
    """Of this rank's generators, as JSON and tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    states = {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """The inverse of `random_states`."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def drop_later_lines(file: Path, step: int) -> None:
    """Cut a metrics file after the line of `step`: the steps after it will be done again."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a kill
    new = file.with_name(f".{file.name}.new")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(file)
