"""Batches of indices for data-parallel training in which every sample is seen exactly once an epoch.

torch's DistributedSampler repeats samples (or drops them) to give ranks equal shares. Here ranks that run out get a
short or an EMPTY batch instead, which `ConversationCollator` turns into one unsupervised token, so that all ranks take
the same number of steps and, with a token-level loss over one global denominator, nothing is counted twice.
"""

import random
from collections.abc import Iterator


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> list[int]:
    """The permutation of `epoch` (from 0); the same on every rank and machine."""
    order = list(range(num_samples))
    if shuffle:
        # A string seed is hashed whole: (seed 0, epoch 1) and (seed 1, epoch 0) are unrelated.
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def check_shares(dp_rank: int, dp_size: int, **sizes: int) -> None:
    """Raise ValueError for a size below 1, by its name, and for a rank that is none of `dp_size`."""
    for name, value in {**sizes, "dp_size": dp_size}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank is {dp_rank}; expected 0 to {dp_size - 1} (dp_size {dp_size})")


class EpochBatchSampler:
    """A `batch_sampler` for torch's DataLoader.

    Step k of an epoch takes positions [k*B*dp, (k+1)*B*dp) of the epoch's permutation, and rank d the d-th run of B of
    them (B: `batch_size` per rank). So the samples of a step depend on B*dp only: dp=1, B=4 sees what dp=2, B=2 sees.

    Call `set_epoch` before each epoch; `set_epoch(epoch, start_batch=k)` resumes after k batches. `len()` is the number
    of batches of a whole epoch, the same on every rank and whatever `start_batch` is, so that it can size a schedule.

    Raises:
        ValueError: a size out of range, or `drop_last` with fewer samples than one global batch (zero steps).
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        check_shares(dp_rank, dp_size, num_samples=num_samples, batch_size=batch_size)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.start_batch = 0
        global_batch = batch_size * dp_size
        self.num_batches = num_samples // global_batch if drop_last else -(-num_samples // global_batch)
        if self.num_batches == 0:
            raise ValueError(
                f"drop_last leaves no batch: {num_samples} samples, and a global batch takes {global_batch} "
                f"(batch_size {batch_size} x dp_size {dp_size}); lower batch_size or turn drop_last off"
            )

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the permutation of `epoch` (from 0) and the batch to start from."""
        if not 0 <= start_batch <= self.num_batches:
            raise ValueError(f"start_batch is {start_batch}; expected 0 to {self.num_batches}")
        self.epoch = epoch
        self.start_batch = start_batch

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.num_samples, self.seed, self.epoch, shuffle=self.shuffle)
        for batch in range(self.start_batch, self.num_batches):
            first = (batch * self.dp_size + self.dp_rank) * self.batch_size
            yield order[first : first + self.batch_size]
