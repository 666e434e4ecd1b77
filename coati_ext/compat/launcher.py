"""`coati_ext run`: the command `colossalai run`, same flags, with its faults mended.

Faults, all in colossalai/cli/launcher (0.5.0):

* run.py `get_launch_command` starts a bare `torchrun`, which need not be on the PATH, and joins the script's arguments
  with blanks for a shell to split again: `--x "a b"` arrives as three arguments, `$` and `*` are expanded.
* multinode_runner.py `run_on_host` puts all of the environment into the command, unquoted, and prints that command when
  it fails: tokens and passwords reach the log, a value with `"` or `$` breaks the launch.
* a missing hostfile or script, a host that is not in the hostfile and a missing --nproc_per_node end with status 0.

Mends: quote every argument and variable, start torchrun's module with this Python, give local processes the environment
by inheritance, print only the command and its status, and end with status 2 on wrong usage. A failed script ends with 1
whatever its own status was: that is torchrun's doing, its report names the status.

It runs in its own process: `apply()` has no part in it, and the processes that it starts are not patched by it.
"""

import importlib
import shlex
import subprocess
import sys
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn

import click

from coati_ext.compat import advice


def main() -> None:
    """Entry point of the console script `coati_ext`."""
    with advice.silenced():
        from colossalai.cli import cli

    mend()
    cli(prog_name="coati_ext")


def mend() -> None:
    """Mend colossalai's launcher in this process."""
    # By import_module: colossalai.cli.launcher.run, as an attribute, is the click command of that name.
    launcher, run, runner = (
        importlib.import_module(f"colossalai.cli.{name}")
        for name in ("launcher", "launcher.run", "launcher.multinode_runner")
    )
    run.get_launch_command = _quoting(run.get_launch_command)
    runner.run_on_host = run_on_host
    for module in (launcher, run):
        _refuse_with_status(module)


def _quoting(get_launch_command: Any) -> Any:
    def quoted(*, user_script: str, user_args: list[str], **kwargs: Any) -> str:
        command = get_launch_command(
            user_script=shlex.quote(user_script), user_args=[shlex.quote(arg) for arg in user_args], **kwargs
        )
        return f"{shlex.quote(sys.executable)} -m torch.distributed.run{command.removeprefix('torchrun')}"

    return quoted


def _refuse_with_status(module: ModuleType) -> None:
    """Replace the bare `exit()` that the module calls after an error message."""

    def exit_with_usage_error() -> NoReturn:
        sys.exit(2)

    module.exit = exit_with_usage_error


def run_on_host(hostinfo: Any, workdir: str, recv_conn: Connection, send_conn: Connection, env: dict[str, str]) -> None:
    """Run the commands received for one host until "exit", and answer each with "success" or "failure".

    Same protocol and arguments as the function of colossalai/cli/launcher/multinode_runner.py that it replaces.
    """
    while (command := recv_conn.recv()) != "exit":
        try:
            status = (
                _run_local(command, workdir) if hostinfo.is_local_host else _run_remote(hostinfo, command, workdir, env)
            )
            if status != 0:
                click.echo(f"{hostinfo.hostname}: status {status} from: {command}", err=True)
            send_conn.send("success" if status == 0 else "failure")
        except Exception as error:  # the launcher waits for an answer: whatever went wrong is reported and is a failure
            click.echo(f"{hostinfo.hostname}: {type(error).__name__}: {error}, running: {command}", err=True)
            send_conn.send("failure")
    send_conn.send("finish")


def _run_local(command: str, workdir: str) -> int:
    return subprocess.run(command, shell=True, cwd=workdir).returncode


def _run_remote(hostinfo: Any, command: str, workdir: str, env: dict[str, str]) -> int:
    import fabric

    # A name such as BASH_FUNC_module%% cannot be exported.
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items() if name.isidentifier())
    with fabric.Connection(hostinfo.hostname, port=hostinfo.port) as connection:
        result = connection.run(f"cd {shlex.quote(workdir)} && export {exports} && {command}", hide=False, warn=True)
    return result.exited


if __name__ == "__main__":
    main()
