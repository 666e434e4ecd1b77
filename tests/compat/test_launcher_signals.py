"""Signals to `coati_ext run`, with real processes: what reaches the ranks, the status, and who is left."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from remote_host import FakeConnection, start_host

pytest.importorskip("fabric", reason="colossalai's command needs fabric")

# Each rank writes its pid, then counts SIGTERM and SIGUSR1 and ends with the given status a moment after the first.
TRAINING = """
import os, signal, sys, time
received = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: received.append(number))
file = os.path.join(sys.argv[1], "rank-" + os.environ["RANK"])
with open(file + ".new", "w") as pid:
    pid.write(str(os.getpid()))
os.rename(file + ".new", file)
while not received:
    time.sleep(0.01)
time.sleep(1)
names = " ".join(signal.Signals(number).name for number in received)
os.write(1, f"rank {os.environ['RANK']} got {names}\\n".encode())  # at once: the ranks share the output
sys.exit(int(sys.argv[2]))
"""
# The same under run_command, with nothing trapped.
COMMAND = """
import os, sys, time
from coati_ext.utils.launch import run_command
def main():
    with open(os.path.join(sys.argv[1], "rank-" + os.environ["RANK"]), "w") as pid:
        pid.write(str(os.getpid()))
    time.sleep(100)
run_command(main)
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Run:
    """`coati_ext run` of a script on two processes, from the moment when both have written their pid."""

    def __init__(self, folder: Path, script: str = TRAINING, status: int = 0, ignoring_hangup: bool = False):
        (folder / "script.py").write_text(script)
        command = [sys.executable, "-m", "coati_ext.compat.launcher", "run", "--nproc_per_node", "2"]
        command += ["--master_port", free_port(), "script.py", str(folder), str(status)]
        self.launcher = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_ignore_hangup if ignoring_hangup else None,
        )
        self.processes = [psutil.Process(self.launcher.pid), *ranks_of(folder, self.launcher)]
        self.processes += self.processes[0].children(recursive=True)

    def end(self) -> tuple[int, str, str]:
        """The status and what was printed; fails if a process is left."""
        try:
            out, err = self.launcher.communicate(timeout=60)
            left = psutil.wait_procs(self.processes, timeout=10)[1]
        finally:
            for process in self.processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        assert not left
        return self.launcher.returncode, out, err


def _ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ranks_of(folder: Path, launcher: subprocess.Popen | None = None) -> list[psutil.Process]:
    files, deadline = [folder / "rank-0", folder / "rank-1"], time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files):
        assert launcher is None or launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return [psutil.Process(int(file.read_text())) for file in files]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_get_the_signal_once_and_the_launcher_waits_for_them(tmp_path, number):
    run = Run(tmp_path)
    run.launcher.send_signal(number)
    time.sleep(0.3)
    run.launcher.send_signal(number)  # as a scheduler may
    status, out, err = run.end()
    assert status == 128 + number
    assert sorted(out.splitlines()) == [f"rank {rank} got {number.name}" for rank in range(2)]
    assert err == ""


def test_a_scheduler_that_signals_every_process_is_one_request(tmp_path):
    run = Run(tmp_path)
    for process in run.processes:
        process.terminate()
    status, out, _ = run.end()
    assert status == 128 + signal.SIGTERM
    assert "rank 0 got SIGTERM" in out and "rank 1 got SIGTERM" in out


def test_a_rank_that_fails_after_the_signal_is_a_failure(tmp_path):
    run = Run(tmp_path, status=7)
    run.launcher.terminate()
    status, _, err = run.end()
    assert status == 1 and "ended with status 7" in err


def test_ctrl_c_ends_every_process_with_one_line(tmp_path):
    """As a terminal sends it: to the launcher's whole process group."""
    run = Run(tmp_path, COMMAND)
    os.killpg(run.launcher.pid, signal.SIGINT)
    status, out, err = run.end()
    assert status == 128 + signal.SIGINT
    assert out == "" and err.split() == ["interrupted"]


def test_the_end_of_the_terminal_stops_a_training(tmp_path):
    run = Run(tmp_path)
    os.killpg(run.launcher.pid, signal.SIGHUP)
    status, out, _ = run.end()
    assert status == 128 + signal.SIGHUP
    assert "rank 0 got SIGTERM" in out and "rank 1 got SIGTERM" in out


def test_but_not_under_nohup(tmp_path):
    run = Run(tmp_path, ignoring_hangup=True)
    os.killpg(run.launcher.pid, signal.SIGHUP)
    time.sleep(1)
    run.launcher.send_signal(signal.SIGUSR1)
    status, out, _ = run.end()
    assert status == 128 + signal.SIGUSR1
    assert "rank 0 got SIGUSR1" in out and "rank 1 got SIGUSR1" in out


def test_a_launcher_that_is_killed_leaves_nobody(tmp_path):
    run = Run(tmp_path)
    run.launcher.kill()
    status, out, _ = run.end()
    assert status == -signal.SIGKILL
    assert "rank 0 got SIGTERM" in out and "rank 1 got SIGTERM" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_remote_host_gets_the_signal_through_the_connection_and_sigterm_when_that_is_lost(
    tmp_path, monkeypatch, capfd, number
):
    monkeypatch.setattr("fabric.Connection", FakeConnection)
    (tmp_path / "script.py").write_text(TRAINING)
    torchrun = f"{sys.executable} -m coati_ext.compat.torchrun --nproc_per_node=2 --master_port={free_port()}"
    host, answers = start_host([f"{torchrun} script.py {tmp_path} 0"], str(tmp_path), dict(os.environ))
    ranks = ranks_of(tmp_path)
    os.kill(host.pid, number)
    host.join(60)
    left = psutil.wait_procs(ranks, timeout=20)[1]
    for rank in left:
        rank.kill()
    assert not left
    seen = "SIGTERM" if number == signal.SIGKILL else number.name
    assert sorted(capfd.readouterr().out.splitlines()) == [f"rank {rank} got {seen}" for rank in range(2)]
    if number != signal.SIGKILL:
        assert [answers.recv(), answers.recv()] == ["success", "finish"]
