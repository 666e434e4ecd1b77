"""Ranks started for a measurement: what they return, and how one that fails ends them all."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from coati_ext.benchmark.process import on_ranks


def sum_of(numbers: list[int]) -> tuple[int, int]:
    mine = torch.tensor(numbers[dist.get_rank()])
    dist.all_reduce(mine)
    return dist.get_rank(), mine.item()


def test_each_rank_answers_in_order_of_rank():
    assert on_ranks(sum_of, 2, "gloo", [3, 4]) == [(0, 7), (1, 7)]


def fail_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("no such thing")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"(?s)rank 1 of 2 raised\n.*ValueError: no such thing$"),
        ("kill", "rank 1 of 2 was ended by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_rank_that_waits_for_it(how, message):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        on_ranks(fail_on_rank_1, 2, "gloo", how)
    assert time.monotonic() - start < 60  # the barrier would wait for 300 s
    assert not multiprocessing.active_children()


def tell_and_sleep() -> None:
    os.write(1, f"{os.getpid()}\n".encode())  # at once: the ranks share the output
    time.sleep(300)


def test_ranks_end_with_the_process_that_started_them():
    code = "import test_process as t; t.on_ranks(t.tell_and_sleep, 2, 'gloo')"
    paths = [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    parent.stdout.read()  # to its end, which comes when no rank holds it any more
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
