"""SIGTERM and SIGUSR1 as a wish to stop after this step, on all ranks at the same one.

    with PreemptionGuard() as guard:
        for batch in batches:
            train_step(batch)
            if guard.requested(group):
                save()
                break

Schedulers send SIGTERM (slurm also SIGUSR1, with `--signal`) some time before SIGKILL, and not to all ranks at once.
"""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from coati_ext.utils.device import current_device

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A launcher passes SIGTERM on to ranks that the scheduler has already sent it to: within this time it is the same wish.
SAME_REQUEST_S = 5.0


class PreemptionGuard:
    """Inside the block the signals are remembered and interrupt nothing; the handlers before come back at its end.

    A further SIGTERM, more than `same_request_s` after the first, goes to the handler before (as a rule it ends the
    process), for a user who will not wait. Python runs handlers between two of its instructions: while a collective
    waits for a rank that is gone, no signal but SIGKILL does anything.

    Raises:
        ValueError: the block is entered outside the main thread, where Python allows no handlers.
    """

    def __init__(self, *, same_request_s: float = SAME_REQUEST_S):
        self.received: signal.Signals | None = None
        """The first signal on this rank."""
        self._same_request_s = same_request_s
        self._first_sigterm: float | None = None
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"PreemptionGuard in thread {threading.current_thread().name}: Python handles signals in the main "
                "thread only; enter it there"
            )
        self._pid = os.getpid()
        for number in SIGNALS:
            # None: a handler that Python did not install, and cannot put back
            self._previous[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child, such as a data loader's worker, is ended as without the guard
            self._fall_through(number, frame)
            return
        self.received = self.received or signal.Signals(number)
        if number != signal.SIGTERM:
            return
        now = time.monotonic()
        if self._first_sigterm is None:
            self._first_sigterm = now
        elif now - self._first_sigterm >= self._same_request_s:
            self._fall_through(number, frame)

    def _fall_through(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[signal.Signals(number)]
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, previous)
            signal.raise_signal(number)

    def requested(self, group: dist.ProcessGroup | None) -> bool:
        """Whether any rank of `group` has received a signal; a collective, once a step. None: a single process."""
        if group is None:
            return self.received is not None
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else current_device()
        received = torch.tensor(int(self.received is not None), device=device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX, group=group)
        return bool(received.item())
