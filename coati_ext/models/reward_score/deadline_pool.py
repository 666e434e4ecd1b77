"""Child processes that answer one request at a time, and are killed and replaced when they exceed the deadline.

A thread cannot stop a computation (an integer power holds the interpreter), and `signal.alarm` works in a main thread
only; a process can be killed from any thread. The children import neither torch nor transformers, start in under a
second, and are kept for the next request.
"""

import atexit
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from typing import Any

_START_LIMIT_S = 120.0  # for the imports of a child, on a busy machine
_MAX_REPLY = 1 << 20
_SERVE = "import sys; sys.path[:] = sys.argv[1:]; from coati_ext.models.reward_score.worker import serve; serve()"


class DeadlineExceeded(Exception):
    """The child had not answered in time, or died of it (memory); it was killed."""


class DeadlinePool:
    """Args: num_workers: the most children at a time; they are started when they are needed.

    Safe to call from several threads. A fork gets children of its own.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; expected at least 1")
        self.num_workers = num_workers
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Children that wait for a request; None is a place for one not started yet. The last used comes first.
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(self.num_workers):
            self._idle.put(None)
        self.num_killed = 0

    def run(self, request: dict[str, Any], deadline_s: float) -> Any:
        """What the child answers to `request`, a JSON object whose "task" the worker knows.

        Raises:
            DeadlineExceeded: after `deadline_s` seconds, not counting the wait for a free child and its start.
            RuntimeError: the child cannot start, or its task failed in a way that no answer explains.
        """
        if self._pid != os.getpid():
            self._reset()
        child = self._idle.get()
        try:
            if child is None or not child.is_alive():
                child = _Child()
            answer = child.ask(request, deadline_s)
        except BaseException as error:
            if child is not None:
                child.kill()
            child = None
            if isinstance(error, DeadlineExceeded):
                with self._lock:
                    self.num_killed += 1
            raise
        finally:
            self._idle.put(child)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the children that are idle. The pool can be used again."""
        if self._pid != os.getpid():
            return
        for _ in range(self.num_workers):
            with contextlib.suppress(queue.Empty):
                child = self._idle.get_nowait()
                if child is not None:
                    child.kill()
                self._idle.put(None)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # half made, or the interpreter ends
            self.close()


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C in the terminal is for the trainer
        )
        try:
            self._read(time.monotonic() + _START_LIMIT_S)
        except DeadlineExceeded:
            self.kill()
            raise RuntimeError(
                f"a grader process did not start (exit code {self._process.returncode}); its error is above"
            ) from None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + deadline_s
        unsent = memoryview(json.dumps({**request, "deadline_s": deadline_s}).encode() + b"\n")
        try:
            while unsent:
                unsent = unsent[self._process.stdin.write(unsent) :]
        except BrokenPipeError:
            raise DeadlineExceeded from None
        return self._read(deadline)

    def _read(self, deadline: float) -> dict[str, Any]:
        descriptor, reply = self._process.stdout.fileno(), b""
        poll = select.poll()  # not select, which fails in a process with more than 1024 open files
        poll.register(descriptor, select.POLLIN)
        while not reply.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise DeadlineExceeded
            read = os.read(descriptor, 65536)
            if not read or len(reply) > _MAX_REPLY:
                raise DeadlineExceeded
            reply += read
        return json.loads(reply)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()


_shared: DeadlinePool | None = None


def shared_pool() -> DeadlinePool:
    """The pool of rewards that are called without one: two children."""
    global _shared
    if _shared is None:
        _shared = DeadlinePool(2)
        atexit.register(_shared.close)
    return _shared
