"""Start and end of a command: the process group, and errors that reach the user once.

Works under `colossalai run`, `torchrun` and with no launcher at all (one process).
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

INTERRUPTED = 128 + signal.SIGINT  # the status that shells give a command ended by Ctrl+C


def ensure_torch_environment() -> None:
    """Give a process that no launcher started the environment of a world of one."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def run_command(main: Callable[[], None]) -> None:
    """Run a command's main; a ValueError or OSError is the user's to mend and is shown as one line, once.

    All ranks usually meet the same error at the same time. Rank 0 tells it and exits at once, whereupon the launcher
    ends the others; another rank waits a moment and speaks only if it is alone. A rank whose collective failed because
    another is gone waits longer: the other has told why. Every rank exits with code 1; after Ctrl+C with 130.
    """
    try:
        _run_and_tell_errors(main)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_rank_0():
            print("\ninterrupted", file=sys.stderr, flush=True)  # below the progress bar
        _exit(INTERRUPTED)
    if dist.is_initialized():
        dist.destroy_process_group()


def _run_and_tell_errors(main: Callable[[], None]) -> None:
    try:
        main()
    except (ValueError, OSError) as error:
        _wait_unless_rank_0()
        print(f"error: {_rank_tag()}{error}", file=sys.stderr, flush=True)
        _exit(1)
    except Exception as error:
        if _is_lost_peer(error):
            time.sleep(5)  # in which the launcher ends this rank
        _wait_unless_rank_0()
        print(f"{_rank_tag()}{traceback.format_exc()}", file=sys.stderr, flush=True)
        _exit(1)


def _is_lost_peer(error: Exception) -> bool:
    """Whether it is what a collective raises when another rank has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _rank_tag() -> str:
    return f"[rank {_rank()}] " if _rank() else ""


def _wait_unless_rank_0() -> None:
    if _rank():
        time.sleep(2 + 0.05 * _rank())


def _exit(status: int) -> None:
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: tearing down a process group whose peers are gone can hang


def is_rank_0() -> bool:
    return _rank() == 0


def print_rank_0(*lines: str) -> None:
    if is_rank_0():
        print(*lines, sep="\n", flush=True)


def launch(seed: int) -> None:
    """Join the process group and seed every rank alike.

    Raises:
        ValueError: more processes on this host than devices.
    """
    import colossalai
    import torch

    ensure_torch_environment()
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}. Lower --nproc_per_node."
        )
    colossalai.launch_from_torch(seed=seed, verbose=False)
