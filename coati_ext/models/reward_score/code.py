"""Reward for Python programs that pass the tests of a data set, run in processes that are limited and killed."""

import ast
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from coati_ext.models.reward_score.answer import Tags, find_answer
from coati_ext.models.reward_score.score import Reason, Score, graded, not_scorable

_log = logging.getLogger(__name__)
_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[ \t]*$", re.MULTILINE)
_LANGUAGES = ("", "python", "py", "python3")
_TESTS = Path(__file__).with_name("sandbox_tests.py")
_START_S = 10.0  # for the processes to start, beside the deadline
_MAX_PROGRAM_CHARS = 100_000
_networks_seen: set[str] = set()


def code_reward(
    completion: str,
    gold: Any,
    *,
    tags: Tags | None = None,
    truncated: bool = False,
    deadline_s: float = 10.0,
    max_memory_mb: int = 1024,
    max_file_mb: int = 16,
    format_score: float = 1.0,
    correct_score: float = 10.0,
) -> Score:
    """ColossalAI's scheme for a program: the last Python block (```) of the completion, or of its answer tags.

    The program runs with limits on processor time, memory, file size and processes, in an empty directory, with a bare
    environment and without a network: in a network namespace where the kernel allows it, or else with sockets refused
    inside the interpreter. It reads the files of Python and of its directory, and changes none outside that, by
    Landlock; where the kernel has none, changes are refused inside the interpreter. The log says once which.

    Args:
        gold: {"inputs": [...], "outputs": [...]}: what is written to the program and what it must print, blanks at the
            ends of lines aside; with "fn_name" the lists of arguments and the values of that function. {"asserts":
            [...]}, a list or a text: Python asserts. A dict, or JSON of one. Asserts run in another process than the
            program, on plain data; classes of the program can be used in them, their own `==` cannot.
        deadline_s: for all tests together. A program that exceeds it is wrong, with the reason "timeout".

    Raises: RuntimeError if the test process itself fails.
    """
    tests = _read_tests(gold)
    if tests is None:
        return not_scorable("gold_unparseable")
    program = _find_program(completion, tags, truncated)
    reason = program[1] or _verdict(
        program[0], tests, deadline_s=deadline_s, max_memory=max_memory_mb << 20, max_file_size=max_file_mb << 20
    )
    return graded(reason, format_score=format_score, correct_score=correct_score)


def _find_program(completion: str, tags: Tags | None, truncated: bool) -> tuple[str, Reason | None]:
    """(program, None) or ("", why there is none)."""
    if tags is not None:
        answer = find_answer(completion, tags=tags, truncated=truncated, marks=False)
        if answer.reason:
            return "", answer.reason
        block, reason = last_block(answer.text)
        return (answer.text, None) if reason == "no_answer" else (block, reason)
    block, reason = last_block(completion.rpartition("</think>")[2])
    return block, "truncated" if reason and truncated else reason


def last_block(text: str) -> tuple[str, Reason | None]:
    """The last fenced Python block; without one "no_answer", and "truncated" if the last one is never closed.

    Example:
        >>> last_block("```python\\nprint(1)\\n```")
        ('print(1)\\n', None)
    """
    block, start, language = None, None, ""
    for fence in _FENCE.finditer(text):
        if start is None:
            start, language = fence.end() + 1, fence[1].lower()
        elif not fence[1]:
            if language in _LANGUAGES:
                block = text[start : fence.start()]
            start = None
    if start is not None and language in _LANGUAGES:
        return "", "truncated"
    return (block, None) if block and block.strip() else ("", "no_answer")


def _read_tests(gold: Any) -> dict[str, Any] | None:
    if isinstance(gold, str):
        with contextlib.suppress(ValueError, RecursionError):
            gold = json.loads(gold)
    if isinstance(gold, dict) and "asserts" in gold:
        gold = gold["asserts"]
    if isinstance(gold, str):
        gold = [gold]
    if isinstance(gold, list):
        return {"asserts": gold} if gold and all(_is_test(text) for text in gold) else None
    if not isinstance(gold, dict):
        return None
    inputs, outputs = gold.get("inputs"), gold.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        return None
    if gold.get("fn_name") is not None:
        named = isinstance(gold["fn_name"], str) and all(isinstance(arguments, list) for arguments in inputs)
        return {"fn_name": gold["fn_name"], "inputs": inputs, "outputs": outputs} if named else None
    texts = all(isinstance(text, str) for text in (*inputs, *outputs))
    return {"inputs": inputs, "outputs": outputs} if texts else None


def _is_test(text: Any) -> bool:
    """Python that asserts something, and calls a name to do so."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Assert) for node in nodes) and any(isinstance(node, ast.Call) for node in nodes)


def _verdict(program: str, tests: dict[str, Any], *, deadline_s: float, **limits: int) -> Reason:
    try:
        if len(program) > _MAX_PROGRAM_CHARS:
            return "wrong"
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "wrong"
    limits["cpu_s"] = max(1, int(deadline_s + 0.999))
    result = _run({"program": program, "deadline_s": deadline_s, "limits": limits, **tests}, deadline_s)
    if result["network"] not in _networks_seen | {"unknown"}:
        _networks_seen.add(result["network"])
        network, files = result["network"].split()
        how = {"namespace": "in a network namespace of their own", "refused": "with sockets refused by Python only"}
        which = {
            "kernel": "see the files of Python and of their own directory only",
            "interpreter": "are kept from changing other files by Python only (this kernel has no Landlock)",
        }
        _log.info("programs of the code reward run %s, and %s", how[network], which[files])
    return {"passed": "correct", "failed": "wrong", "timeout": "timeout"}[result["verdict"]]


def _run(task: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """Have the test process judge; it and all below it are killed when it takes too long."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(_TESTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        cwd="/",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps(task).encode(), timeout=deadline_s + _START_S)
    except subprocess.TimeoutExpired:
        return {"verdict": "timeout", "network": "unknown"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode != 0 or not output:
        raise RuntimeError(f"the test process of the code reward failed: {errors.decode(errors='replace')[-500:]}")
    return json.loads(output)
