"""The process of the tests: runs the program in a process of its own, and judges what comes back.

Started by `code.py` as `python -I sandbox_tests.py`, with a JSON task on its standard input, in a session of its own.
The tests are the data set's, and are trusted; the program is not. Asserts run here, on plain data: a call of a
function of the program is a message to its process. Standard library only.
"""

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NoReturn

_PR_SET_DUMPABLE = 4
_CPU_SIGNALS = (128 + signal.SIGXCPU, 128 + signal.SIGKILL, -signal.SIGXCPU, -signal.SIGKILL)


class Failed(BaseException):
    """A test did not pass; the text says which. No `except Exception` of a test catches it."""


class OutOfTime(BaseException):
    """The deadline of all tests together. No `except Exception` of a test catches it."""


class Program:
    """The program in its process, in an empty directory."""

    def __init__(self, task: dict[str, Any], *, stdin: str | None) -> None:
        self._stdio = stdin is not None
        self.directory = tempfile.TemporaryDirectory()
        self._output = _file_of("")
        requests, self._to_program = os.pipe()
        self._from_program, answers = os.pipe()
        self._note, note = os.pipe()
        program = _file_of(task["program"])
        settings = {
            **task["limits"],
            "stdio": self._stdio,
            "program_fd": program.fileno(),
            "requests_fd": requests,
            "answers_fd": answers,
            "note_fd": note,
        }
        with program, _file_of(stdin or "") as given:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", _beside("sandbox_program.py"), json.dumps(settings)],
                stdin=given,
                stdout=self._output if self._stdio else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self.directory.name,
                env={**os.environ, "HOME": self.directory.name, "TMPDIR": self.directory.name},
                pass_fds=(program.fileno(), requests, answers, note),
            )
        for descriptor in (requests, answers, note):
            os.close(descriptor)
        self._requests = os.fdopen(self._to_program, "wb")
        self._answers = os.fdopen(self._from_program, "rb")

    def output(self, limit: int) -> str:
        """What it printed, once it has ended."""
        code = self.process.wait()
        if code in _CPU_SIGNALS:
            raise OutOfTime
        if code != 0:
            raise Failed(f"exit code {code}")
        self._output.seek(0)
        return self._output.read(limit).decode("utf-8", "replace")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            line = self._answers.readline(1 << 24)
        except OSError:
            line = b""
        if not line:
            self._raise_ended()
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise Failed("the program answered what cannot be read") from None
        if isinstance(reply, dict) and "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), None)
            known = isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
            raise (kind if known and kind not in (UnicodeDecodeError, UnicodeEncodeError) else RuntimeError)("raised")
        return reply

    def _raise_ended(self) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closed the pipe, and goes on
            if self.process.wait(timeout=1.0) in _CPU_SIGNALS:
                raise OutOfTime
        raise Failed("the program ended before the tests")

    def network(self) -> str:
        """How the program was kept from the network and from files: "namespace kernel", "refused interpreter"."""
        with contextlib.suppress(OSError):
            return os.read(self._note, 64).decode() or "unknown"
        return "unknown"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self._requests, self._answers, self._output):
            with contextlib.suppress(OSError):  # what is left to write has no reader
                file.close()
        os.close(self._note)
        self.directory.cleanup()


class Proxy:
    """An object of the program. It is equal to itself only, and neither true nor false."""

    def __init__(self, program: Program, handle: int) -> None:
        self.__dict__.update(_program=program, _handle=handle)

    def _value(self, reply: dict[str, Any]) -> Any:
        try:
            return decode(reply["value"], lambda handle: Proxy(self._program, handle))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Failed("the program answered what cannot be read") from None

    def __getattr__(self, name: str) -> Any:
        return self._value(self._program.ask({"op": "get", "on": self._handle, "name": name}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and other._handle == self._handle

    def __hash__(self) -> int:
        return hash(self._handle)

    def __len__(self) -> int:
        try:
            return self.__getattr__("__len__")()
        except AttributeError:  # `list` asks for the length, and takes this for an answer
            raise TypeError("an object of the program has no length") from None

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __contains__(self, item: Any) -> bool:
        return self.__getattr__("__contains__")(item)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._value(self._program.ask({"op": "list", "on": self._handle})))

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        def handle_of(value: Any) -> int:
            if not isinstance(value, Proxy):
                raise TypeError(f"a {type(value).__name__} cannot be passed to the program")
            return value._handle

        request = {"op": "call", "on": self._handle}
        request |= {"arguments": encode(arguments, handle_of), "keywords": encode(keywords, handle_of)}
        reply = self._program.ask(request)
        value = self._value(reply)
        after = self._value({"value": reply.get("arguments", {"tuple": []})})
        for argument, changed in zip(arguments, after, strict=False):
            if isinstance(argument, list) and isinstance(changed, list):
                argument[:] = changed
            elif isinstance(argument, dict | set) and type(changed) is type(argument):
                argument.clear()
                argument.update(changed)
        return value


def names_of_program(tree: ast.Module) -> tuple[set[str], set[str]]:
    """(names, modules) that a test uses and neither defines nor imports: the program's, and the standard library's.

    What is called by its bare name is the program's; a standard library module, used as `name.attribute`, is never
    taken from the program, which could have put its own in the place.
    """
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    free = {node.id for node in names} - defined - set(dir(builtins))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    modules = {name for name in free - called if name in sys.stdlib_module_names}
    return free - modules, modules


def run_asserts(task: dict[str, Any]) -> str:
    """Returns how the network was kept away; raises what failed."""
    program = Program(task, stdin=None)
    try:
        root, namespace = Proxy(program, 0), {"__name__": "tests"}
        for source in task["asserts"]:
            names, modules = names_of_program(ast.parse(source))
            namespace |= {name: importlib.import_module(name) for name in modules}
            for name in names - set(namespace):
                with contextlib.suppress(KeyError):
                    namespace[name] = getattr(root, name)
            exec(compile(source, "tests", "exec"), namespace)
        return program.network()
    finally:
        program.close()


def run_calls(task: dict[str, Any]) -> str:
    """`fn_name` of the program, or of its class Solution, on each list of arguments."""
    program = Program(task, stdin=None)
    try:
        root = Proxy(program, 0)
        try:
            function = getattr(root, task["fn_name"])
        except KeyError:
            function = getattr(root.Solution(), task["fn_name"])
        for number, (arguments, expected) in enumerate(zip(task["inputs"], task["outputs"], strict=True)):
            if _as_json(function(*arguments)) != expected:
                raise Failed(f"call {number}")
        return program.network()
    finally:
        program.close()


def run_stdio(task: dict[str, Any]) -> str:
    network = "unknown"
    for number, (given, expected) in enumerate(zip(task["inputs"], task["outputs"], strict=True)):
        program = Program(task, stdin=given)
        try:
            # One character more than allowed, so that nothing is cut into the right output.
            if _lines(program.output(task["limits"]["max_file_size"] + 1)) != _lines(expected):
                raise Failed(f"output {number}")
            network = program.network()
        finally:
            program.close()
    return network


def judge(task: dict[str, Any]) -> dict[str, Any]:
    """{"verdict": passed, failed or timeout, "network": how it was kept away, "why": of a failure}."""

    def out_of_time(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, task["deadline_s"])
    run = run_asserts if "asserts" in task else run_calls if "fn_name" in task else run_stdio
    try:
        return {"verdict": "passed", "network": run(task), "why": ""}
    except OutOfTime:
        return {"verdict": "timeout", "network": "unknown", "why": f"not done in {task['deadline_s']} s"}
    except (Exception, Failed) as error:
        return {"verdict": "failed", "network": "unknown", "why": f"{type(error).__name__}: {error}"[:500]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _as_json(value: Any) -> Any:
    """Tuples as lists and keys as text, which is what JSON made of the expected value."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key if isinstance(key, str) else json.dumps(key): _as_json(item) for key, item in value.items()}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _file_of(text: str) -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (for the process that reads it)
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)
    return file


def _beside(name: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from sandbox_values import decode, encode

    sys.path.pop(0)  # its `code.py` is not the standard library's
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)  # as for the program
    print(json.dumps(judge(json.load(sys.stdin))))
