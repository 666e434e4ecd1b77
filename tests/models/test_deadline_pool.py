import os
import subprocess
import sys
import threading
import time

import pytest

from coati_ext.models.reward_score.deadline_pool import DeadlineExceeded, DeadlinePool

QUICK = {"task": "regex", "pattern": "a+", "text": "aa", "ignore_case": False}
FOREVER = {"task": "regex", "pattern": "(a+)+", "text": "a" * 60 + "b", "ignore_case": False}


def child_pid(pool):
    child = pool._idle.get()
    pool._idle.put(child)
    return child._process.pid


@pytest.fixture
def pool():
    pool = DeadlinePool(1)
    yield pool
    pool.close()


def test_a_child_that_exceeds_the_deadline_is_killed_and_replaced(pool):
    assert pool.run(QUICK, 5.0) == "correct"
    first = child_pid(pool)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        pool.run(FOREVER, 0.3)
    assert time.monotonic() - began < 2.0
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert pool.run(QUICK, 5.0) == "correct"
    assert child_pid(pool) != first and pool.num_killed == 1


def test_a_child_is_kept(pool):
    pids = set()
    for _ in range(3):
        pool.run(QUICK, 5.0)
        pids.add(child_pid(pool))
    assert len(pids) == 1


def test_a_child_that_died_while_idle_is_replaced(pool):
    pool.run(QUICK, 5.0)
    child = pool._idle.get()
    child._process.kill()
    child._process.wait()
    pool._idle.put(child)
    assert pool.run(QUICK, 5.0) == "correct"


def test_the_wait_for_a_child_does_not_count(pool):
    results = []

    def ask():
        results.append(pool.run(QUICK, 1.0))

    def hold():
        with pytest.raises(DeadlineExceeded):
            pool.run(FOREVER, 1.5)

    threads = [threading.Thread(target=hold), *(threading.Thread(target=ask) for _ in range(3))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert results == ["correct"] * 3


def test_a_task_that_fails_is_an_error_and_not_a_verdict(pool):
    with pytest.raises(RuntimeError, match="KeyError: 'no_such_task'"):
        pool.run({"task": "no_such_task"}, 5.0)
    assert pool.run(QUICK, 5.0) == "correct"


def test_a_fork_has_children_of_its_own(pool):
    pool.run(QUICK, 5.0)
    here = child_pid(pool)
    pid = os.fork()
    if pid == 0:
        try:
            right = pool.run(QUICK, 5.0) == "correct" and child_pid(pool) != here
            pool.close()
        except BaseException:
            right = False
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pool.run(QUICK, 5.0) == "correct" and child_pid(pool) == here


def test_children_end_with_their_parent_even_while_they_compute():
    script = (
        "import threading\n"
        "from coati_ext.models.reward_score.deadline_pool import DeadlinePool\n"
        "pool = DeadlinePool(1)\n"
        f"pool.run({QUICK!r}, 5.0)\n"
        "child = pool._idle.get(); pool._idle.put(child)\n"
        "print(child._process.pid, flush=True)\n"
        f"threading.Thread(target=pool.run, args=({FOREVER!r}, 1.0), daemon=True).start()\n"
        "import os, time; time.sleep(0.3); os._exit(0)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    pid = int(result.stdout)
    for _ in range(100):  # it ends itself within its deadline and two seconds
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":  # nobody reads its exit status
                return
        time.sleep(0.1)
    pytest.fail(f"the grader process {pid} outlived its parent")


def test_no_grader_process_imports_torch():
    script = (
        "import sys\n"
        "import coati_ext.models.reward_score.worker\n"
        "import coati_ext.models.reward_score as rewards\n"
        "assert len(rewards.REWARDS) > 5\n"
        "print([name for name in ('torch', 'transformers', 'sympy', 'math_verify', 'numpy') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_workers_is_refused():
    with pytest.raises(ValueError, match="num_workers is 0"):
        DeadlinePool(0)
