"""What a command's processes print and end with when one of them, or the user, ends it."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from coati_ext.utils.launch import run_command

def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == int(sys.argv[1]):
        raise {error}
    while True:
        dist.all_reduce(torch.ones(1))

run_command(main)
"""
LAUNCHER = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
LAUNCHER += ["--rdzv_endpoint", "localhost:0"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_with_the_error_tells_it_and_the_others_say_nothing(tmp_path, rank):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(error="ValueError('--flag 3 is wrong')"))
    command = [sys.executable, *LAUNCHER, str(script), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == f"error: {'[rank 1] ' if rank else ''}--flag 3 is wrong"
    assert "gloo" not in done.stderr and done.stderr.count("Traceback") == 1  # torchrun's own


def test_a_lone_process_ends_as_a_shell_expects_of_ctrl_c(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nfrom coati_ext.utils.launch import run_command\n"
        "run_command(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130 and done.stderr.split() == ["interrupted"]
