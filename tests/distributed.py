"""A pool of processes that stays up between tests: starting one costs seconds of imports.

    results = pool(2).run(function, *args)     # function(*args) on every rank; the list of what the ranks returned
    results = pool(2, "cuda").run(...)         # NCCL, and one GPU a rank or, where there are fewer, one for all

`function` must be importable (module level). An exception on any rank is raised here with that rank's traceback, and
the pool is started anew for the next test.
"""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

TIMEOUT_S = 240


def free_port() -> int:
    """Of this host; nobody has it at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ProcessPool:
    def __init__(self, size: int, device: str):
        self.size, self.device = size, device
        self._processes: list = []
        self._pipes: list = []

    def run(self, function: Callable, *args: Any, timeout: float = TIMEOUT_S) -> list:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        try:
            answers = self._receive(function, timeout)
        except BaseException:
            self.stop()
            raise
        return answers

    def _receive(self, function: Callable, timeout: float) -> list:
        """In the order in which they come: the ranks that wait for one that failed have no answer."""
        answers, end = {}, time.monotonic() + timeout
        while len(answers) < self.size:
            missing = [rank for rank in range(self.size) if rank not in answers]
            ready = wait([self._pipes[rank] for rank in missing], end - time.monotonic())
            if not ready:
                raise TimeoutError(
                    f"ranks {missing} of {self.size} gave no answer in {timeout} s to {function.__name__}"
                )
            for rank in missing:
                if self._pipes[rank] in ready:
                    ok, answers[rank] = self._pipes[rank].recv()
                    if not ok:
                        raise AssertionError(f"rank {rank} of {self.size}:\n{answers[rank]}")
        return [answers[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self.size, self.device, port, theirs, sys.path), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


_pools: dict[tuple[int, str], ProcessPool] = {}


def pool(size: int, device: str = "cpu") -> ProcessPool:
    return _pools.setdefault((size, device), ProcessPool(size, device))


def stop_pools() -> None:
    for running in _pools.values():
        running.stop()


def _work(rank: int, size: int, device: str, port: int, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # colossalai takes a GPU wherever it sees one
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        if torch.cuda.device_count() < size:
            from gpu.share_gpu import share_gpu

            share_gpu(rank)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
