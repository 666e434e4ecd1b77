"""Which optimizer step of a GRPO run trains on which completions, and the temperature of an episode."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from coati_ext.experience_buffer import Experience, NaiveExperienceBuffer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ticks of a run."""

    num_episodes: int
    num_collect_steps: int
    num_update_steps: int
    steps_per_pass: int

    @property
    def steps_per_episode(self) -> int:
        """Optimizer steps."""
        return self.num_update_steps * self.steps_per_pass

    @property
    def ticks_per_episode(self) -> int:
        return self.num_collect_steps + self.steps_per_episode


def rows_of_step(lengths: Sequence[int], rows_per_step: int, number: int, seed: str) -> list[int]:
    """The rows of step `number` of a pass, which takes each row once in an order that the seed gives.

    They come by length: micro-batches of like rows have little padding, and no split changes the loss.

    Example:
        >>> [rows_of_step([5, 3, 9, 1, 2], 2, number, "0") for number in range(3)]
        [[3, 4], [1, 0], [2]]
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    return sorted(order[number * rows_per_step :][:rows_per_step], key=lambda row: lengths[row])


def micro_batches_of(
    buffer: NaiveExperienceBuffer,
    rows: list[int],
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    only_taught: bool,
) -> list[Experience]:
    """The rows on the device, in micro-batches, as many on every rank of `group`; a collective.

    Args:
        only_taught: leave out rows without an advantage or without a token in the loss. A rank that has fewer left
            fills up with a row that is not in the loss.
    """
    kept = buffer.kept
    taught = (kept.advantages != 0) & kept.action_mask.any(-1)
    chosen = [row for row in rows if taught[row] or not only_taught]
    batches = list(buffer.batches(device, chosen))
    most = torch.tensor(len(batches), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    filler = kept.take(torch.tensor(rows[:1]))
    filler.action_mask = torch.zeros_like(filler.action_mask)
    return batches + [filler.to(device)] * (max(1, int(most)) - len(batches))


def annealed_temperature(config: Mapping[str, float], episode: int, num_episodes: int) -> float:
    """Linear from the first episode to the last.

    Args:
        config: ColossalChat's: start_temperature, end_temperature, and if wanted, in episodes, annealing_warmup_steps
            (at the start temperature, default 0) and annealing_steps (default: all that are left).

    Raises:
        ValueError: a key that is missing or unknown.

    Example:
        >>> config = {"start_temperature": 1.0, "end_temperature": 0.5}
        >>> [annealed_temperature(config, episode, 3) for episode in range(3)]
        [1.0, 0.75, 0.5]
    """
    known = {"start_temperature", "end_temperature", "annealing_warmup_steps", "annealing_steps"}
    if not {"start_temperature", "end_temperature"} <= config.keys() <= known:
        raise ValueError(f"temperature_annealing_config has the keys {sorted(config)}; known are {sorted(known)}")
    first, last = config["start_temperature"], config["end_temperature"]
    warmup = config.get("annealing_warmup_steps", 0)
    steps = config.get("annealing_steps", num_episodes - 1 - warmup)
    progress = (episode - warmup) / max(1, steps)
    return first + (last - first) * min(max(progress, 0.0), 1.0)
