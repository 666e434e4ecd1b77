"""Signals to real processes: what they interrupt, and who stops when."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from distributed import pool

from coati_ext.utils.preemption import PreemptionGuard

STEPS = """
import multiprocessing, os, signal, sys, time
from coati_ext.utils.preemption import PreemptionGuard
{before}
with PreemptionGuard(same_request_s={same_request_s}) as guard:
    {inside}
    print("ready", flush=True)
    while not guard.requested(None):
        time.sleep(0.01)
    print("asked by", guard.received.name, flush=True)
    for line in sys.stdin:
        print("went on", flush=True)
print("end", flush=True)
for line in sys.stdin:
    pass
time.sleep(60)
"""


class Trainer:
    """A process that prints where it is and goes on by a line of its input."""

    def __init__(self, before: str = "", inside: str = "", same_request_s: float = 0.0):
        code = STEPS.format(before=before, inside=inside, same_request_s=same_request_s)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.expect("ready")

    def expect(self, line: str) -> None:
        assert self.process.stdout.readline().strip() == line

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_remembered_and_ends_nothing_until_the_block_does(number):
    with Trainer() as trainer:
        trainer.process.send_signal(number)
        trainer.expect(f"asked by {number.name}")
        trainer.process.stdin.write("step\n")
        trainer.expect("went on")
        trainer.process.stdin.close()
        trainer.expect("end")
        trainer.process.send_signal(number)  # the default handler is back
        assert trainer.process.wait(30) == -number


def test_a_second_sigterm_ends_the_process_as_without_the_guard():
    with Trainer() as trainer:
        trainer.process.send_signal(signal.SIGTERM)
        trainer.expect("asked by SIGTERM")
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.process.wait(30) == -signal.SIGTERM


def test_a_second_sigterm_calls_the_handler_before():
    before = "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'before\\n'))"  # print may be at work itself
    with Trainer(before) as trainer:
        trainer.process.send_signal(signal.SIGTERM)
        trainer.expect("asked by SIGTERM")
        trainer.process.send_signal(signal.SIGTERM)
        trainer.expect("before")


def test_a_sigterm_that_a_launcher_passes_on_again_is_the_same_request():
    with Trainer(same_request_s=60) as trainer:
        trainer.process.send_signal(signal.SIGTERM)
        trainer.expect("asked by SIGTERM")
        trainer.process.send_signal(signal.SIGTERM)
        trainer.process.stdin.write("step\n")
        trainer.expect("went on")


def test_sigterm_after_sigusr1_is_no_second_sigterm():
    with Trainer() as trainer:
        trainer.process.send_signal(signal.SIGUSR1)
        trainer.expect("asked by SIGUSR1")
        trainer.process.send_signal(signal.SIGTERM)
        trainer.process.stdin.write("step\n")
        trainer.expect("went on")


def test_a_forked_child_can_be_terminated():
    inside = (
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)); child.start(); "
        "time.sleep(0.2); child.terminate(); child.join(30); print(child.exitcode, guard.received, flush=True)"
    )
    code = STEPS.format(before="", inside=inside, same_request_s=60).split("    print")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(-signal.SIGTERM), "None"]


def test_handlers_come_back_after_an_error():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(KeyError), PreemptionGuard():
        raise KeyError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers


def test_another_thread_is_refused():
    errors = []

    def enter() -> None:
        try:
            PreemptionGuard().__enter__()
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter, name="loader")
    thread.start()
    thread.join()
    assert len(errors) == 1 and "thread loader" in errors[0]


def _steps_until_stop(signalled_rank: int, at_step: int) -> tuple[int, bool]:
    with PreemptionGuard() as guard:
        for step in range(10):
            if dist.get_rank() == signalled_rank and step == at_step:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
            if guard.requested(dist.group.WORLD):
                return step, guard.received is not None
    return -1, False


@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_all_ranks_stop_at_the_step_at_which_one_was_signalled(signalled_rank):
    stopped = pool(2).run(_steps_until_stop, signalled_rank, 3)
    assert [step for step, _ in stopped] == [3, 3]
    assert [received for _, received in stopped] == [rank == signalled_rank for rank in range(2)]
