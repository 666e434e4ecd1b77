"""What a program of the code reward can reach. Probes ask only whether something is possible, and change nothing."""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coati_ext.models.reward_score import code, sandbox_files, sandbox_program, sandbox_tests
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


def test_it_reads_changes_and_removes_no_file_of_the_user(tmp_path):
    """Whoever the program runs as: root where others cannot read Python, else nobody or the user."""
    tmp_path.chmod(0o777)
    file = tmp_path / "checkpoint"
    file.write_text("weights")
    file.chmod(0o666)
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1:  # this kernel has Landlock
        assert refused(f"open({str(file)!r}).read()")
        assert refused(f"os.listdir({str(tmp_path)!r})", "import os")
    assert refused(f"open({str(file)!r}, 'a').write('x')")
    assert refused(f"os.remove({str(file)!r})", "import os")
    assert refused(f"os.truncate({str(file)!r}, 0)", "import os")
    assert refused(f"os.rename({str(file)!r}, 'mine')", "import os")
    assert refused(f"os.mkdir({str(tmp_path / 'new')!r})", "import os")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"] and file.read_text() == "weights"


def test_without_landlock_changes_elsewhere_are_refused_in_the_interpreter(tmp_path):
    folder, own = os.path.dirname(sandbox_files.__file__), tmp_path / "own"
    own.mkdir()
    (tmp_path / "f").write_text("")
    statements = ("open('../f', 'a')", "os.open('../f', os.O_RDWR)", "os.remove('../f')", "shutil.rmtree('..')")
    for number, statement in enumerate((*statements, "os.rename('x', '../x')", "os.chmod('../f', 0)")):
        script = f"import os, shutil, sys; sys.path.insert(0, {folder!r}); import sandbox_files; sys.path.pop(0)\n"
        script += "sandbox_files.confine(type('Libc', (), {'syscall': lambda *_: -1}))\nopen('x', 'w').close()\n"
        script += (
            f"os.mkdir('d{number}'); shutil.rmtree('d{number}')\nopen('../f').close()\nprint('so far', flush=True)\n"
        )
        result = subprocess.run([sys.executable, "-c", script + statement], capture_output=True, text=True, cwd=own)
        assert result.stdout == "so far\n" and "is not allowed here" in result.stderr, result.stderr
    assert (tmp_path / "f").exists()


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


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(z): return z * 1j", "assert f(1j) == -1"),
        ("def f(n): return range(n)", "assert f(3) == range(3)"),
        ("def f(): return bytearray(b'a')", "assert f() == b'a'"),
        ("import math\ndef f(n): return math.factorial(n)", "assert f(2000) == math.factorial(2000)"),
        (
            "from collections import deque\ndef f(): return deque([4])",
            "assert len(f()) == 1 and f()[0] == 4 and 4 in f()",
        ),
        ("def f(): return map(int, '12')", "assert list(f()) == [1, 2]"),
        ("from enum import Enum\nclass C(Enum):\n    A = 1\ndef f(): return C.A", "assert f() == C.A"),
    ],
)
def test_values_that_a_right_program_returns(program, test):
    assert code_reward(f"```python\n{program}\n```", [test]).reason == "correct"


def test_keys_of_a_returned_dict_are_compared_as_json_has_them():
    gold = {"fn_name": "f", "inputs": [[3]], "outputs": [{"3": 1}]}
    assert code_reward("```python\ndef f(x): return {x: 1}\n```", gold).reason == "correct"
    assert code_reward("```python\ndef f(x): return {x + 1: 1}\n```", gold).reason == "wrong"


def test_objects_of_a_program_are_equal_to_themselves_only():
    program = "```python\nclass A:\n    def __eq__(self, other):\n        return True\n\n    __hash__ = None\n```"
    assert code_reward(program, ["a = A()\nassert a == a and a != A() and a != 1"]).reason == "correct"


def test_the_end_of_a_program_is_no_exception_that_a_test_expects():
    test = "try:\n    f()\nexcept Exception:\n    pass\nelse:\n    assert False"
    assert code_reward("```python\ndef f(): raise ValueError\n```", [test]).reason == "correct"
    assert code_reward("```python\nimport os\ndef f(): os._exit(0)\n```", [test]).reason == "wrong"
