"""The handler of torchrun's signals."""

import signal
import sys

from coati_ext.compat import torchrun


class Worker:
    def __init__(self):
        self.received = []

    def send_signal(self, number):
        self.received.append(number)


def call_interrupted(handler: torchrun.Requests, number: int, at: int) -> bool:
    """Call the handler, and once more from within at its `at`-th instruction; whether it has that many."""
    code, seen = torchrun.Requests.__call__.__code__, 0

    def trace(frame, event, arg):
        nonlocal seen
        if frame.f_code is not code or seen > at:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen > at:
                handler(number, None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        handler(number, None)
    finally:
        sys.settrace(before)
    return seen > at


def test_a_signal_that_interrupts_its_own_handler_is_one_request(monkeypatch):
    """The launcher passes on what a closed terminal has sent to every process already."""
    worker = Worker()
    monkeypatch.setattr(torchrun.psutil.Process, "children", lambda self: [worker])
    at = 0
    while call_interrupted(torchrun.Requests(), signal.SIGHUP, at):
        assert worker.received == [signal.SIGTERM], f"interrupted at instruction {at}"
        worker.received.clear()
        at += 1
    assert at > 50
