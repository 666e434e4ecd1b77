"""`coati_ext run`: the command `colossalai run`, same flags, with its faults mended.

Faults, all in colossalai/cli/launcher (0.5.0):

* run.py `get_launch_command` starts a bare `torchrun`, which need not be on the PATH, and joins the script's arguments
  with blanks for a shell to split again: `--x "a b"` arrives as three arguments, `$` and `*` are expanded.
* multinode_runner.py `run_on_host` puts all of the environment into the command, unquoted, and prints that command when
  it fails: tokens and passwords reach the log, a value with `"` or `$` breaks the launch.
* a missing hostfile or script, a host that is not in the hostfile and a missing --nproc_per_node end with status 0.
* a signal ends the launcher and leaves the hosts training; Ctrl+C prints tracebacks of every process.
* run.py `launch_multi_processes` prints the same status of every host twice, below the error that the script told.

Mends: quote every argument and variable, start torchrun's module with this Python, give local processes the environment
by inheritance, and end with status 2 on wrong usage. SIGTERM, SIGINT, SIGUSR1 and SIGHUP (unless ignored, as under
nohup) are passed on to torchrun on every host, of which `coati_ext.compat.torchrun` says what it does with them. If the
launcher is killed, or the connection to a host lost, torchrun takes it for SIGTERM.

Ends with 0; with 1 if the script failed on a host, whatever its own status, which is told; with 128 + its number (143
for SIGTERM, 130 for Ctrl+C) after a signal that the launcher was sent, if nothing failed: the training is not done.

It runs in its own process: `apply()` has no part in it, and the processes that it starts are not patched by it.
"""

import functools
import importlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import click

from coati_ext.compat import advice
from coati_ext.compat.torchrun import SIGNALS, STDIN_VARIABLE, die_with_parent

_received: list[int] = []


def main() -> None:
    """Entry point of the console script `coati_ext`."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _pass_on)
    with advice.silenced():
        from colossalai.cli import cli

    mend()
    try:
        cli(prog_name="coati_ext")
    except SystemExit as end:
        if _received and not end.code:
            sys.exit(128 + _received[-1])
        raise


def _pass_on(number: int, frame: FrameType | None) -> None:
    """To the processes that run the hosts; without any, the launcher ends."""
    _received.append(number)
    hosts = multiprocessing.active_children()
    for host in hosts:
        os.kill(host.pid, number)
    if not hosts:
        sys.exit(128 + number)


def mend() -> None:
    """Mend colossalai's launcher in this process."""
    # By import_module: colossalai.cli.launcher.run, as an attribute, is the click command of that name.
    launcher, run, runner = (
        importlib.import_module(f"colossalai.cli.{name}")
        for name in ("launcher", "launcher.run", "launcher.multinode_runner")
    )
    run.get_launch_command = _quoting(run.get_launch_command)
    run.click = SimpleNamespace(echo=_echo)
    runner.run_on_host = run_on_host
    runner.MultiNodeRunner.connect = _without_signals(runner.MultiNodeRunner.connect)
    for module in (launcher, run):
        _refuse_with_status(module)


def _quoting(get_launch_command: Any) -> Any:
    def quoted(*, user_script: str, user_args: list[str], **kwargs: Any) -> str:
        command = get_launch_command(
            user_script=shlex.quote(user_script), user_args=[shlex.quote(arg) for arg in user_args], **kwargs
        )
        return f"{shlex.quote(sys.executable)} -m coati_ext.compat.torchrun{command.removeprefix('torchrun')}"

    return quoted


def _refuse_with_status(module: ModuleType) -> None:
    """Replace the bare `exit()` that the module calls after an error message."""

    def exit_with_usage_error() -> NoReturn:
        sys.exit(2)

    module.exit = exit_with_usage_error


def _echo(message: str, **kwargs: Any) -> None:
    """Errors of usage only: what became of a host is told by `run_on_host`, and by the exit status."""
    is_status = message.endswith((": success", ": failure", ": finish", " All Nodes ====="))
    if not is_status:
        click.echo(message, **kwargs)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Signals wait until the end of the block, and in the processes started in it until these unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _without_signals(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _blocked_signals():
            return function(*args, **kwargs)

    return wrapped


class _Signals:
    """Handler of a host's process: sends on what it gets, once there is something to send it to."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._waiting: list[int] = []
        self._send: Callable[[int], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._waiting.append(number)
        self._deliver()

    @contextmanager
    def sent_by(self, send: Callable[[int], None]) -> Iterator[None]:
        self._send = send
        self._deliver()
        try:
            yield
        finally:
            self._send = None

    def _deliver(self) -> None:
        while self._send is not None and self._waiting:
            self._send(self._waiting.pop(0))

    def ended_well(self, status: int) -> bool:
        return status == 0 or any(status in (-number, 128 + number) for number in self.received)


def run_on_host(hostinfo: Any, workdir: str, recv_conn: Connection, send_conn: Connection, env: dict[str, str]) -> None:
    """Run the commands received for one host until "exit", and answer each with "success" or "failure".

    Same protocol and arguments as the function of colossalai/cli/launcher/multinode_runner.py that it replaces. Takes
    over the signals of its process.
    """
    signals = _Signals()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with_parent()
    launcher = os.getppid()
    while (command := _receive(recv_conn, launcher)) != "exit":
        try:
            if hostinfo.is_local_host:
                status = _run_local(command, workdir, signals)
            else:
                status = _run_remote(hostinfo, command, workdir, env, signals)
            well = signals.ended_well(status)
            if not well and not hostinfo.is_local_host:
                click.echo(f"{hostinfo.hostname}: status {status} from: {command}", err=True)
            send_conn.send("success" if well else "failure")
        except Exception as error:  # the launcher waits for an answer: whatever went wrong is reported and is a failure
            click.echo(f"{hostinfo.hostname}: {type(error).__name__}: {error}, running: {command}", err=True)
            send_conn.send("failure")
    send_conn.send("finish")


def _receive(connection: Connection, launcher: int) -> str:
    while not connection.poll(1):
        if os.getppid() != launcher:  # killed; the pipe does not end, as this process has both of its ends
            return "exit"
    return connection.recv()


def _run_local(command: str, workdir: str, signals: _Signals) -> int:
    """In a session of its own: Ctrl+C reaches torchrun once, through the launcher."""
    with _blocked_signals():
        process = subprocess.Popen(f"exec {command}", shell=True, cwd=workdir, start_new_session=True)
    with signals.sent_by(process.send_signal):
        return process.wait()


def _run_remote(hostinfo: Any, command: str, workdir: str, env: dict[str, str], signals: _Signals) -> int:
    """Signals go as lines to the command's stdin, which ends with the connection."""
    import fabric

    # A name such as BASH_FUNC_module%% cannot be exported.
    exports = " ".join(
        f"{name}={shlex.quote(value)}" for name, value in {**env, STDIN_VARIABLE: "1"}.items() if name.isidentifier()
    )
    reader, writer = os.pipe()
    with (
        os.fdopen(reader, "rb", buffering=0) as stdin,  # unbuffered: fabric asks select() whether there is more
        os.fdopen(writer, "wb", buffering=0) as names,
        fabric.Connection(hostinfo.hostname, port=hostinfo.port) as connection,
        signals.sent_by(lambda number: names.write(f"{signal.Signals(number).name}\n".encode())),
    ):
        result = connection.run(
            f"cd {shlex.quote(workdir)} && export {exports} && {command}", hide=False, warn=True, in_stream=stdin
        )
    return result.exited


if __name__ == "__main__":
    main()
