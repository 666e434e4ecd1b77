"""The checkpoint tools on a GPU: the CPU's bytes, within the memory that is promised."""

from pathlib import Path

import pytest
import torch
from fp8_checkpoint import make_fp8_dir

from applications import bf16_cast_fp8, fp8_cast_bf16
from coati_ext.benchmark.synthetic import write_checkpoint
from coati_ext.checkpoint_io.checkpoint import read_checkpoint
from coati_ext.checkpoint_io.fp8_to_bf16 import fp8_to_bf16
from coati_ext.checkpoint_io.rewrite import WorkOptions

pytestmark = pytest.mark.gpu


def run(tool, source: Path, output: Path, *flags: str) -> None:
    names = {fp8_cast_bf16: ("fp8", "bf16"), bf16_cast_fp8: ("bf16", "fp8")}[tool]
    paths = [f"--input-{names[0]}-hf-path", str(source), f"--output-{names[1]}-hf-path", str(output)]
    assert tool.main([*paths, *flags]) == 0


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_cpu_and_gpu_write_the_same_bytes(tmp_path):
    make_fp8_dir(tmp_path / "fp8", mtp=True)
    for device in ("cpu", "cuda"):
        run(fp8_cast_bf16, tmp_path / "fp8", tmp_path / f"bf16-{device}", "--device", device, "--verify", "all")
        run(bf16_cast_fp8, tmp_path / "bf16-cpu", tmp_path / f"fp8-{device}", "--device", device)
    assert content(tmp_path / "bf16-cuda") == content(tmp_path / "bf16-cpu")
    assert content(tmp_path / "fp8-cuda") == content(tmp_path / "fp8-cpu")


def test_device_memory_is_that_of_the_strips(tmp_path):
    """Of 16 workers, 48 MiB each as `stream` says, whatever the checkpoint's size."""
    write_checkpoint(tmp_path / "fp8", 5_000_000_000)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    options = WorkOptions(device="cuda", num_workers=16, show_progress=False)
    fp8_to_bf16(read_checkpoint(tmp_path / "fp8"), tmp_path / "bf16", options=options)
    assert torch.cuda.max_memory_reserved() - before < 1_000_000_000
