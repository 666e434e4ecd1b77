"""torchrun as `coati_ext run` starts it on each host: signals that let the training save, and a report of one line.

Faults, all in torch/distributed/elastic (2.11 to 2.13):

* agent/server/api.py kills workers 30 s after the SIGTERM that torchrun was sent, which a large model's step and state
  need not keep, sends the signal to their children too (a data loader's worker dies, and with it the step), and ends
  with a traceback and status 1. SIGUSR1 ends torchrun and leaves the workers training.
* multiprocessing/errors reports one failed worker in 40 lines, below the error that the worker told.

Mends: SIGTERM, SIGUSR1 and SIGHUP (as SIGTERM) are passed on to the workers alone, which end when they have saved. The
same signal again, 5 s later or more, and SIGINT at once are torchrun's own: it passes the signal on and kills after
30 s. The report is one line; with LOGLEVEL in the environment, torchrun's log messages are shown as ever.

Ends with 0, with 1 if a worker failed, or with 128 + the signal that ended the training well.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

STDIN_VARIABLE = "COATI_EXT_SIGNALS_FROM_STDIN"
"""In the environment of remote hosts: signals arrive as lines with their names, the end of the input means SIGTERM."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_REQUEST_S = 5.0  # a scheduler signals every process of a job, so that a signal arrives here by several ways

_PR_SET_PDEATHSIG = 1
_VERBOSE = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")


def main() -> None:
    """`python -m coati_ext.compat.torchrun`, with torchrun's arguments."""
    requests = Requests()
    for number in SIGNALS:
        signal.signal(number, requests)
    if os.environ.pop(STDIN_VARIABLE, None):
        _read_signals_from_stdin()
    else:
        die_with_parent()
    sys.exit(run_torchrun(requests))


class Requests:
    """The signal handler: passes a signal on to the workers, or raises what ends torchrun."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._first_seen: dict[int, float] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        now = time.monotonic()
        first_seen = self._first_seen.setdefault(number, now)  # one step: the same signal may interrupt this
        again = first_seen is not now
        if again and now - first_seen < SAME_REQUEST_S:
            return
        self.last, self._first_seen[number] = number, now
        workers = psutil.Process().children()
        if again or number == signal.SIGINT or not workers:
            raise SignalException(f"torchrun got {signal.Signals(number).name}", sigval=signal.Signals(number))
        for worker in workers:
            worker.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def run_torchrun(requests: Requests) -> int:
    """Run torchrun's main with the arguments of this process; returns the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    api._terminate_process_handler = requests  # which it installs when it starts the workers
    if "LOGLEVEL" not in os.environ:
        for name in _VERBOSE:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocked them until now
        run.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if requests.last is None or failure.exitcode not in (-requests.last, 128 + requests.last):
            print(describe_failure(rank, failure), file=sys.stderr, flush=True)
            return 1
    except api.SignalException:
        pass
    return 0 if requests.last is None else 128 + requests.last


def describe_failure(rank: int, failure: "ProcessFailure") -> str:
    """One line on the worker that failed first."""
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"rank {rank} (local rank {failure.local_rank} on {socket.gethostname()}) {how}; all ranks were stopped"


def die_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the one that started it is gone (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _read_signals_from_stdin() -> None:
    """Take stdin for the signals' names; the workers get an empty one."""
    lines = os.fdopen(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def read() -> None:
        main_thread = threading.main_thread().ident
        for line in lines:
            signal.pthread_kill(main_thread, signal.Signals[line.strip()])
        signal.pthread_kill(main_thread, signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()


if __name__ == "__main__":
    main()
