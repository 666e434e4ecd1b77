"""FP8 -> BF16 in processes that are killed, that run out of disk, and whose memory is watched."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import torch
from fp8_checkpoint import dequantize, make_fp8_dir
from safetensors.torch import load_file, save_file

from applications.fp8_cast_bf16 import main

ROOT = Path(__file__).parents[2]
E4M3 = torch.float8_e4m3fn

KILLER = """
import os, random, signal, sys, time
from applications.fp8_cast_bf16 import main
from coati_ext.checkpoint_io import stream
stream.STRIP_ELEMENTS = 128 * 256
source, output, num_kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
arguments = ["--input-fp8-hf-path", source, "--output-bf16-hf-path", output]
reference = output + "-reference"
def child(arguments):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        os._exit(main(arguments))
    return pid
def tree(folder):
    return {name: open(os.path.join(folder, name), "rb").read() for name in sorted(os.listdir(folder))}
start = time.time()
assert os.waitpid(child([*arguments[:3], reference]), 0)[1] == 0
seconds = time.time() - start
expected, generator, kills, ended, continued = tree(reference), random.Random(0), 0, 0, 0
while kills < num_kills:
    pid = child(arguments)
    time.sleep(generator.uniform(0, seconds))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.path.exists(output):
        made = tree(output)
        made.pop(".coati_ext-journal.jsonl", None)  # killed between the rename and this file's end
        assert made == expected
        for name in os.listdir(output):
            os.unlink(os.path.join(output, name))
        os.rmdir(output)
        ended += 1
        continue
    assert os.WIFSIGNALED(status), status
    kills += 1
    work = output + ".incomplete"
    if os.path.exists(work):
        files = [name for name in os.listdir(work) if name.endswith(".safetensors")]
        continued += bool(files)
        for name in files:  # under its final name a file is whole
            assert open(os.path.join(work, name), "rb").read() == expected[name], name
assert os.waitpid(child(arguments), 0)[1] == 0
assert tree(output) == expected
print(f"kills {kills} ended {ended} continued {continued}")
"""


def run_python(code: str, *arguments: object, **kwargs) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, **kwargs)


def test_killed_at_50_random_moments_nothing_is_lost_and_nothing_wrong_is_written(tmp_path):
    make_fp8_dir(tmp_path / "in", num_hidden_layers=3, num_shards=12)
    result = run_python(KILLER, tmp_path / "in", tmp_path / "out", 50)
    assert result.returncode == 0, result.stderr
    counts = dict(zip(result.stdout.split()[::2], map(int, result.stdout.split()[1::2]), strict=True))
    assert counts["kills"] == 50
    assert counts["continued"] >= 5  # killed after some file was finished


def test_a_disk_that_fills_up_in_between_is_named_and_the_run_can_be_continued(tmp_path):
    make_fp8_dir(tmp_path / "in")
    command = "import sys; from applications.fp8_cast_bf16 import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["--input-fp8-hf-path", tmp_path / "in", "--output-bf16-hf-path", tmp_path / "out"]

    def limit() -> None:  # files may not grow past this: write fails as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    result = run_python(command, *arguments, preexec_fn=limit)
    assert result.returncode == 1
    assert "File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*/*.part"))
    assert main([*map(str, arguments), "--verify", "all"]) == 0


MEMORY = """
import sys
from pathlib import Path
from applications.fp8_cast_bf16 import main
import coati_ext.checkpoint_io.fp8_to_bf16, coati_ext.checkpoint_io.verify_fp8
def resident(what):
    return int(Path("/proc/self/status").read_text().split(what + ":")[1].split()[0]) * 1024
before = resident("VmRSS")
status = main(["--input-fp8-hf-path", sys.argv[1], "--output-bf16-hf-path", sys.argv[2], "--workers", "2"])
print(status, resident("VmHWM") - before)
"""


def test_memory_is_that_of_the_strips_not_of_the_tensors(tmp_path):
    rows, columns = 40960, 8192
    weight = torch.randint(0, 0x7F, (rows // 8, columns), dtype=torch.uint8).repeat(8, 1).view(E4M3)
    (tmp_path / "in").mkdir()
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.rand(rows // 128, columns // 128)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    result = run_python(MEMORY, tmp_path / "in", tmp_path / "out")
    status, grown = map(int, result.stdout.split()[-2:])
    assert status == 0, result.stderr
    strips = 2 * 48 << 20  # what stream.py says: 48 MiB a worker
    assert grown < strips + (60 << 20) < weight.nbytes
    made = load_file(tmp_path / "out" / "model.safetensors")["a.weight"]
    last = slice(-128, None)
    assert torch.equal(made[last], dequantize(weight[last], tensors["a.weight_scale_inv"][-1:]).float().bfloat16())
