"""A remote host for tests of the launcher: a connection that behaves as ssh does, on this machine."""

import subprocess
import threading
from multiprocessing import Pipe, get_context
from types import SimpleNamespace
from typing import BinaryIO

from coati_ext.compat import launcher


class FakeConnection:
    """Stands for ssh: runs the command with a shell, in an environment without this process's variables."""

    def __init__(self, host: str, port: int | None):
        assert (host, port) == ("worker-1", 22)

    def __enter__(self) -> "FakeConnection":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, command: str, hide: bool, warn: bool, in_stream: BinaryIO) -> SimpleNamespace:
        if "unreachable" in command:
            raise OSError("no route to host")
        # As sshd does: a session of its own, an input that ends when this process does, no signal.
        process = subprocess.Popen(["bash", "-c", command], env={}, stdin=subprocess.PIPE, start_new_session=True)

        def copy_stdin() -> None:
            while letter := in_stream.read(1):
                process.stdin.write(letter)
                process.stdin.flush()

        threading.Thread(target=copy_stdin, daemon=True).start()
        return SimpleNamespace(exited=process.wait())


def start_host(commands: list[str], workdir: str, env: dict[str, str]) -> tuple:
    """A process with `run_on_host` for a remote host given these commands, and the pipe of its answers."""
    command_out, command_in = Pipe()
    answer_out, answer_in = Pipe()
    for command in [*commands, "exit"]:
        command_in.send(command)
    host = SimpleNamespace(hostname="worker-1", port=22, is_local_host=False)
    arguments = (host, workdir, command_out, answer_in, env)
    process = get_context("fork").Process(target=launcher.run_on_host, args=arguments)  # with the fake connection
    process.start()
    return process, answer_out
