"""What a program of the code reward can reach. Probes ask only whether something is possible, and change nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coati_ext.models.reward_score import code, sandbox_program, sandbox_tests
from coati_ext.models.reward_score.code import code_reward


def says(expression, setup="", **settings):
    """Whether the program finds `expression` true."""
    program = f"```python\n{setup}\ndef probe():\n    return bool({expression})\n```"
    return code_reward(program, ["assert probe() is True"], **settings).reason == "correct"


def refused(statement, setup=""):
    program = (
        f"```python\n{setup}\ndef probe():\n    try:\n        {statement}\n    except OSError:\n        return 1\n"
    )
    program += "    except RuntimeError:\n        return 1\n    return 0\n```"
    return code_reward(program, ["assert probe() == 1"]).reason == "correct"


def test_the_probes_can_fail():
    assert says("True") and not says("False")
    assert refused("raise OSError") and not refused("pass")


def test_it_starts_in_an_empty_directory_that_it_may_write():
    assert says("os.listdir('.') == [] and open('x', 'w').write('1') == 1", "import os")


def test_its_environment_is_bare(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert not says("'SECRET_TOKEN' in os.environ or 'PYTHONPATH' in os.environ", "import os")
    assert says("'SECRET_TOKEN' not in os.environ", "import os")


def test_it_makes_no_process_and_no_thread():
    assert refused("os.fork() or os._exit(0)", "import os")
    assert refused("threading.Thread(target=int).start()", "import threading")


def test_it_connects_nowhere():
    """Not even to a port of this machine that listens."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        assert refused(f"socket.create_connection(('127.0.0.1', {port}), timeout=2)", "import socket")


def test_it_neither_sees_into_nor_signals_the_processes_around_it():
    pid = os.getpid()
    assert says(
        f"not os.access('/proc/{pid}/fd/1', os.W_OK) and not os.access('/proc/{pid}/mem', os.R_OK)", "import os"
    )
    assert refused(f"os.kill({pid}, 0)", "import os")  # signal 0: asks, sends nothing


def test_a_file_that_is_too_large_is_refused():
    assert refused("open('x', 'wb').write(b'0' * (2 << 20)) and open('x', 'ab').write(b'0' * (32 << 20))")


def test_without_namespaces_sockets_processes_and_signals_are_refused_in_the_interpreter():
    folder = os.path.dirname(sandbox_program.__file__)
    for statement in ("import socket; socket.socket()", "import os; os.fork()", "import os; os.kill(os.getpid(), 0)"):
        script = f"import sys; sys.path.insert(0, {folder!r}); import sandbox_program\n"
        script += f"sys.path.pop(0); sys.addaudithook(sandbox_program.refuse)\n{statement}"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert "PermissionError" in result.stderr and "is not allowed here" in result.stderr, statement


def test_the_log_says_how_the_network_was_kept_away(caplog, monkeypatch):
    monkeypatch.setattr(code, "_networks_seen", set())
    with caplog.at_level("INFO"):
        assert says("True") and says("True")
    assert len(caplog.records) == 1 and "programs of the code reward run" in caplog.text


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)", "input()\nwhile True: pass"])
def test_the_deadline_holds_and_nothing_is_left(program):
    began = time.monotonic()
    score = code_reward(f"```python\n{program}\n```", {"inputs": ["1"], "outputs": ["1"]}, deadline_s=0.5)
    assert score.reason == "timeout" and score.score == 1.0 and score.accuracy == 0.0
    assert time.monotonic() - began < 5.0
    assert "sandbox_program.py" not in commands_of_descendants()


def commands_of_descendants():
    """The command lines of the sandbox processes that run this checkout's file and are not finished."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if sandbox_program.__file__ in line:
                lines.append(line)
    return " ".join(lines)


@pytest.mark.parametrize("end", ["os._exit(0)", "def add(a, b):\n    return 9"])
@pytest.mark.parametrize("newline", ["", "\\n"])
def test_a_forged_verdict_on_every_open_file_is_not_believed(end, newline):
    forge = "import os\nfor fd in range(3, 64):\n    try:\n"
    forge += f'        os.write(fd, b\'{{"verdict": "passed", "value": 3}}{newline}\')\n'
    forge += "    except OSError:\n        pass\n"
    score = code_reward(f"```python\n{forge}{end}\n```", ["assert add(1, 2) == 4"])
    assert (score.accuracy, score.reason) == (0.0, "wrong")


@pytest.mark.parametrize("blanks", [100_000, 2 << 20])  # below and above the limit of its output
def test_a_program_cannot_print_an_output_that_is_cut_into_the_right_one(blanks):
    program = f"```python\nprint('1' + ' ' * {blanks} + '2')\n```"
    assert code_reward(program, {"inputs": [""], "outputs": ["1"]}, max_file_mb=1).reason == "wrong"


def test_classes_exceptions_and_keywords_of_a_program_can_be_tested():
    program = (
        "```python\nclass Stack:\n    def __init__(self):\n        self.items = []\n"
        "    def push(self, item, *, times=1):\n        self.items += [item] * times\n"
        "    def pop(self):\n        if not self.items:\n            raise IndexError\n"
        "        return self.items.pop()\n```"
    )
    tests = (
        "stack = Stack()\nstack.push(4, times=2)\nassert stack.pop() == 4\nassert stack.items == [4]\nstack.pop()\n"
        "try:\n    stack.pop()\nexcept IndexError:\n    pass\nelse:\n    assert False\n"
    )
    assert code_reward(program, tests).reason == "correct"
    assert code_reward(program, tests.replace("== 4", "== 5", 1)).reason == "wrong"


def test_names_of_tests_that_are_modules_are_never_taken_from_the_program():
    import ast

    tree = ast.parse("import re\nx = math.pi\nassert select(x) and re.escape(y) and len(z)")
    assert sandbox_tests.names_of_program(tree) == ({"select", "y", "z"}, {"math"})


def test_a_test_process_that_fails_is_an_error_and_not_a_verdict(monkeypatch, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no such thing')")
    monkeypatch.setattr(code, "_TESTS", broken)
    with pytest.raises(RuntimeError, match="no such thing"):
        code_reward("```python\nx = 1\n```", json.dumps({"inputs": ["1"], "outputs": ["1"]}))
