"""Measure a function in processes made for it: one, whose peak memory is its own, or the ranks of a process group."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=5)  # of a collective that some rank does not join


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Most memory that this process has had, in bytes; of its GPUs the one with most, 0 without any."""

    host: int
    device_allocated: int
    device_reserved: int


def own_peaks() -> Peaks:
    """Of this process, since it started."""
    status = Path("/proc/self/status").read_text()  # not getrusage, whose peak is the parent's too
    devices = range(torch.cuda.device_count())
    return Peaks(
        host=1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]),
        device_allocated=max((torch.cuda.max_memory_allocated(i) for i in devices), default=0),
        device_reserved=max((torch.cuda.max_memory_reserved(i) for i in devices), default=0),
    )


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, or raises, in a new process that has nothing of this one.

    Raises:
        BrokenProcessPool: the process was killed, for memory most likely.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def on_ranks(function: Callable[..., Any], world_size: int, backend: str, *args: Any) -> list[Any]:
    """What `function(*args)` returns on each rank of a new process group on this host, by rank.

    Args:
        function: of a module, not a closure; the default process group is there when it is called.
        backend: nccl, with GPU `rank` as the current device of each rank, or gloo, on CPUs.

    Raises:
        RuntimeError: a rank raised, with its traceback, or died; the other ranks are ended at once.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, world_size, backend, store.port)
            processes.append(context.Process(target=_work, args=(place, theirs, function, args), daemon=True))
            processes[-1].start()
            theirs.close()  # held by the rank alone: the pipe ends with it
            pipes.append(ours)
        return _answers(processes, pipes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _answers(processes: list[BaseProcess], pipes: list[Connection]) -> list[Any]:
    """As they come, so that a rank that fails is seen while the others wait for it."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        missing = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        for pipe in wait(list(missing)):
            rank = missing[pipe]
            try:
                error, answers[rank] = pipe.recv()
            except EOFError:
                error = _cause_of_death(processes[rank])
            if error is not None:
                # A rank that died makes others fail for want of it: then its death is what to tell.
                dead = [r for r in missing.values() if r != rank and processes[r].exitcode is not None]
                rank, error = (dead[0], _cause_of_death(processes[dead[0]])) if dead else (rank, error)
                raise RuntimeError(f"rank {rank} of {len(pipes)} {error}")
    return [answers[rank] for rank in range(len(pipes))]


def _cause_of_death(process: BaseProcess) -> str:
    process.join()
    if process.exitcode is not None and process.exitcode < 0:
        return f"was ended by {signal.Signals(-process.exitcode).name} (SIGKILL: for want of memory, most likely)"
    return f"left with exit code {process.exitcode} and no answer"


def _work(place: tuple[int, int, str, int], pipe: Connection, function: Callable[..., Any], args: tuple) -> None:
    """One rank. Once it has answered it waits to be ended, so that no other rank fails for want of it."""
    rank, world_size, backend, port = place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that started this one, which ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        pipe.send((None, function(*args)))
    except Exception:
        pipe.send((f"raised\n{traceback.format_exc().rstrip()}", None))
    threading.Event().wait()


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
