import json
import os
import shlex
import socket
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from coati_ext.compat import launcher

pytest.importorskip("fabric", reason="colossalai's command needs fabric")

SECRET = 'tok"en-$HOME-5f2e'
ARGUMENTS = ["--x", "a b", "$HOME", "*", "it's", ""]

# Writes its arguments and the variable SECRET where the first argument says, and fails.
SCRIPT = """
import json, os, sys
with open(sys.argv[1], "w") as file:
    json.dump([sys.argv[2:], os.environ.get("SECRET")], file)
sys.exit(3)
"""


def run_cli(module: str, *arguments: str, tmp_path: Path, path: str) -> subprocess.CompletedProcess:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return subprocess.run(
        [sys.executable, "-m", module, "run", "--nproc_per_node", "1", "--master_port", port, *arguments],
        env={**os.environ, "SECRET": SECRET, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "a script.py"
    path.write_text(SCRIPT)
    return path


def test_arguments_environment_and_failure_arrive(tmp_path, script):
    """Without the environment's bin folder on the PATH, so without a torchrun to find."""
    result = tmp_path / "result.json"
    run = run_cli(
        "coati_ext.compat.launcher", str(script), str(result), *ARGUMENTS, tmp_path=tmp_path, path="/usr/bin:/bin"
    )
    assert json.loads(result.read_text()) == [ARGUMENTS, SECRET], run.stderr
    assert run.returncode == 1
    assert "127.0.0.1: failure" in run.stdout
    assert "exitcode  : 3" in run.stdout + run.stderr  # torchrun's report
    assert SECRET not in run.stdout + run.stderr


def test_missing_hostfile_is_an_error(tmp_path, script):
    run = run_cli(
        "coati_ext.compat.launcher", "--hostfile", "absent", str(script), tmp_path=tmp_path, path=os.environ["PATH"]
    )
    assert "no such file: absent" in run.stdout
    assert run.returncode == 2


def test_faults_are_still_upstream(tmp_path):
    """No torchrun on the PATH, secrets printed; and a missing hostfile that passes for success."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # No shell metacharacters here: with SECRET's quote the launch would break before torchrun is looked for.
    secret, path = "token-5f2e", "/usr/bin:/bin"
    environment = {"PATH": path, "SECRET": secret, "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "colossalai.cli.cli", "run", "--nproc_per_node", "1"]
    run = subprocess.run(
        [*command, str(script), "result"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert "torchrun: command not found" in run.stderr + run.stdout
    assert secret in run.stdout + run.stderr
    run = subprocess.run([*command, "--hostfile", "absent", script], env=environment, cwd=tmp_path)
    assert run.returncode == 0


class FakeConnection:
    """Stands for ssh: runs the command with a shell, in an environment without this process's variables."""

    def __init__(self, host: str, port: int | None):
        assert (host, port) == ("worker-1", 22)

    def __enter__(self) -> "FakeConnection":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, command: str, hide: bool, warn: bool) -> SimpleNamespace:
        if "unreachable" in command:
            raise OSError("no route to host")
        return SimpleNamespace(exited=subprocess.run(["bash", "-c", command], env={}).returncode)


def answers(commands: list[str], workdir: str, env: dict[str, str]) -> list[str]:
    """What `run_on_host` sends for a remote host given these commands."""
    command_out, command_in = Pipe()
    answer_out, answer_in = Pipe()
    for command in [*commands, "exit"]:
        command_in.send(command)
    host = SimpleNamespace(hostname="worker-1", port=22, is_local_host=False)
    launcher.run_on_host(host, workdir, command_out, answer_in, env)
    return [answer_out.recv() for _ in range(len(commands) + 1)]


def test_remote_host_gets_folder_and_environment(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("fabric.Connection", FakeConnection)
    folder = tmp_path / "a folder"
    folder.mkdir()
    env = {"SECRET": SECRET, "BASH_FUNC_module%%": "() { :; }", "PATH": os.environ["PATH"]}
    write = shlex.join(
        [sys.executable, "-c", "import os; open('out', 'w').write(os.environ['SECRET'])"],
    )
    assert answers([write, "exit 5", "unreachable"], str(folder), env) == ["success", "failure", "failure", "finish"]
    assert (folder / "out").read_text() == SECRET
    errors = capfd.readouterr().err
    assert "worker-1: status 5 from: exit 5" in errors
    assert "worker-1: OSError: no route to host, running: unreachable" in errors
    assert SECRET not in errors
