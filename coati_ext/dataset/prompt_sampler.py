"""The order of prompts in reinforcement learning: one endless sequence, the same for all ranks and layouts.

The sequence is epoch after epoch, each a permutation of all prompts. A step takes the next `num_prompts * dp_size` of
it, also across the end of an epoch, so every rank has the same number of prompts in every step and none is left out.
The position counts prompts over all ranks: a run may go on in another layout and meets the prompts that come next.
"""

from typing import Any

from coati_ext.dataset.sampler import check_shares, epoch_order


class PromptSampler:
    """Hands each data-parallel rank the indices of its prompts, step by step.

    Args:
        dataset_size: prompts in the data set.
        num_prompts: prompts of one rank in one step.
        fingerprint: of the data set (`RawPromptDataset.fingerprint()`); a saved position is refused for another.

    Raises:
        ValueError: a size out of range, or a step of more prompts than the data set has (some would come twice).

    Example:
        >>> sampler = PromptSampler(5, 2, dp_rank=0, dp_size=2, seed=0, fingerprint="a", shuffle=False)
        >>> sampler.next_indices(), sampler.next_indices(), sampler.epoch
        ([0, 1], [4, 0], 1)
    """

    def __init__(
        self,
        dataset_size: int,
        num_prompts: int,
        *,
        dp_rank: int,
        dp_size: int,
        seed: int,
        fingerprint: str,
        shuffle: bool = True,
    ) -> None:
        check_shares(dp_rank, dp_size, dataset_size=dataset_size, num_prompts=num_prompts)
        if num_prompts * dp_size > dataset_size:
            raise ValueError(
                f"a step takes {num_prompts * dp_size} prompts (num_prompts {num_prompts} x dp_size {dp_size}), but "
                f"the data set has {dataset_size}: lower num_prompts"
            )
        self.dataset_size = dataset_size
        self.num_prompts = num_prompts
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.fingerprint = fingerprint
        self.shuffle = shuffle
        self.position = 0
        self._orders: dict[int, list[int]] = {}

    @property
    def epoch(self) -> int:
        """The epoch (from 0) that the next prompt is of."""
        return self.position // self.dataset_size

    @property
    def steps_per_epoch(self) -> float:
        return self.dataset_size / (self.num_prompts * self.dp_size)

    def next_indices(self, num_prompts: int | None = None) -> list[int]:
        """This rank's indices of the next step; every rank must ask for the same number.

        `num_prompts` other than the usual is for steps that need more, as when groups without a signal are replaced.
        """
        count = self.num_prompts if num_prompts is None else num_prompts
        if count < 1:
            raise ValueError(f"num_prompts is {count}; expected at least 1")
        first = self.position + self.dp_rank * count
        self.position += self.dp_size * count
        return [self._index(position) for position in range(first, first + count)]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from; of plain types, the same on every rank."""
        return {
            "position": self.position,
            "dataset_size": self.dataset_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, in this layout.

        Raises:
            ValueError: the position is of another data set or order, named with both values.
        """
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"the sampler's state has the keys {sorted(state)}; expected {sorted(own)}")
        for name in ("fingerprint", "dataset_size", "seed", "shuffle"):
            if state[name] != own[name]:
                raise ValueError(
                    f"the saved position is of prompts with {name} {state[name]!r}, these have {own[name]!r}: go on "
                    "with the same data set, template, max_length and seed, or start anew"
                )
        if type(state["position"]) is not int or state["position"] < 0:
            raise ValueError(f"the saved position is {state['position']!r}; expected 0 or more")
        self.position = state["position"]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, self.dataset_size)
        if epoch not in self._orders:
            if len(self._orders) > 1:  # a step reaches into the next epoch at most
                self._orders.clear()
            self._orders[epoch] = epoch_order(self.dataset_size, self.seed, epoch, shuffle=self.shuffle)
        return self._orders[epoch][offset]
