import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from remote_host import FakeConnection, start_host

pytest.importorskip("fabric", reason="colossalai's command needs fabric")

SECRET = 'tok"en-$HOME-5f2e'
ARGUMENTS = ["--x", "a b", "$HOME", "*", "it's", ""]
REST = "all ranks were stopped"

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
    assert run.stderr.splitlines() == [f"rank 0 (local rank 0 on {socket.gethostname()}) ended with status 3; {REST}"]
    assert run.stdout == ""


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


def answers(commands: list[str], workdir: str, env: dict[str, str]) -> list[str]:
    process, pipe = start_host(commands, workdir, env)
    received = [pipe.recv() for _ in range(len(commands) + 1)]
    process.join(30)
    return received


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
