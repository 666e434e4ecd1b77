"""FP8 -> BF16 against what users have: the kernel against a device copy, the tool against a copy of its output.

Each column is measured in the same run. Bytes are those read plus those written for kernels and copies on a device, and
those written for checkpoints.
"""

import gc
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from coati_ext.benchmark.process import in_own_process, own_peaks
from coati_ext.benchmark.synthetic import write_checkpoint
from coati_ext.checkpoint_io.checkpoint import read_checkpoint
from coati_ext.checkpoint_io.fp8_format import SCALE_SUFFIX
from coati_ext.checkpoint_io.fp8_to_bf16 import fp8_to_bf16
from coati_ext.checkpoint_io.rewrite import WorkOptions
from coati_ext.kernel.fp8_cast import dequantize_fp8, dequantize_fp8_reference
from coati_ext.utils.sizes import format_bytes

SHAPES = ((64, 7168, 2048), (64, 2048, 7168), (1, 18432, 7168))
CPU_SHAPES = ((1, 2048, 7168), (1, 576, 7168))
_KEPT_SHARDS = 2  # of the published script's cache
_SPARE_BYTES = 2_000_000_000


def kernels(device: torch.device) -> str:
    """A table of the dequantisation of DeepSeek-V3's shapes."""
    on_gpu = device.type == "cuda"
    others: dict[str, Callable] = {"torch": dequantize_fp8_reference}
    if on_gpu:
        from coati_ext.kernel.fp8_cast_triton import dequantize_fp8_one_block_per_program

        others["one program a block"] = lambda weight, scale: [
            dequantize_fp8_one_block_per_program(w, s) for w, s in zip(weight, scale, strict=True)
        ]
    lines = [f"{'weight':<18}{'ours':>16}{'copy':>16}{'ours/copy':>11}" + "".join(f"{f'ours/{n}':>26}" for n in others)]
    for shape in SHAPES if on_gpu else CPU_SHAPES:
        weight = torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        grid = (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
        scale = torch.rand(grid, device=device)
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        nbytes = weight.nbytes + scale.nbytes + out.nbytes
        half = torch.empty(2, nbytes // 2, dtype=torch.uint8, device=device)
        seconds = {
            "ours": _median_seconds(lambda w=weight, s=scale, o=out: dequantize_fp8(w, s, out=o), device),
            "copy": _median_seconds(lambda h=half: h[1].copy_(h[0]), device),
        }
        for name, other in others.items():
            if on_gpu and name == "torch":  # its float32 copies of a whole batch would not show the kernel
                chunk = slice(0, 8)
                factor = max(shape[0] / 8, 1)
            else:
                chunk, factor = slice(None), 1
            seconds[name] = factor * _median_seconds(lambda o=other, w=weight[chunk], s=scale[chunk]: o(w, s), device)
        ours, copy = nbytes / seconds["ours"], nbytes / seconds["copy"]
        label = f"{shape[0]} x " * (shape[0] > 1) + f"[{shape[1]}, {shape[2]}]"
        lines.append(
            f"{label:<18}{ours / 1e9:>11.0f} GB/s{copy / 1e9:>11.0f} GB/s{ours / copy:>11.2f}"
            + "".join(f"{seconds[name] / seconds['ours']:>25.2f}x" for name in others)
        )
        del weight, scale, out, half
        gc.collect()
    return "\n".join(lines)


def checkpoints(work: Path, source: Path | None, size: int, baseline_bytes: int, options: WorkOptions) -> str:
    """Convert a synthetic checkpoint of `size` bytes, copy the output, and convert a part of it as published.

    Args:
        work: an empty or new folder for the output, on the disk to measure.
        source: folder to write the checkpoint to, or that has it (default: below `work`).
        baseline_bytes: input bytes for the published scheme, which takes long.
    """
    source = source or work / "fp8"
    if not (source / "config.json").is_file():
        print(f"writing a checkpoint to {source}, which stays there", flush=True)
        print(f"it has {format_bytes(write_checkpoint(source, size))}", flush=True)
    device = options.devices()[0]
    lines = [
        f"input {format_bytes(_nbytes(source))} on {_filesystem(source)}, read once before (page cache)",
        f"output on {_filesystem(work)}; 'with sync' is until all of it is on the disk",
    ]
    _read_all(source)
    os.sync()
    rows = {}
    rows["ours"] = in_own_process(_ours, source, work / "bf16", options)
    rows["copy of the output"] = _copy(work / "bf16", work / "copy")
    shutil.rmtree(work / "bf16")
    rows["as published"] = in_own_process(_published, source, work / "published", baseline_bytes, device)
    shutil.rmtree(work / "published", ignore_errors=True)
    lines.append(f"{'':<20}{'written':>12}{'GB/s':>8}{'with sync':>11}{'host':>10}{'device':>10}")
    for name, (nbytes, seconds, synced, host, on_device) in rows.items():
        memory = f"{host / 1e9:>7.2f} GB{on_device / 1e9:>7.2f} GB" if host else ""
        lines.append(
            f"{name:<20}{nbytes / 1e9:>9.1f} GB{nbytes / seconds / 1e9:>8.2f}{nbytes / synced / 1e9:>11.2f}{memory}"
        )
    rate = {name: (row[0] / row[1], row[0] / row[2]) for name, row in rows.items()}
    for name in ("copy of the output", "as published"):
        plain, synced = (a / b for a, b in zip(rate["ours"], rate[name], strict=True))
        lines.append(f"ours / {name:<20}{plain:>6.2f}, with sync {synced:.2f}")
    return "\n".join(lines)


Row = tuple[int, float, float, int, int]  # bytes written, seconds, seconds with sync, peak host bytes, device bytes


def _ours(source: Path, output: Path, options: WorkOptions) -> Row:
    for device in options.devices():  # the context is not the tool's doing
        torch.zeros(1, device=device)
    start = time.perf_counter()
    fp8_to_bf16(read_checkpoint(source), output, options=options)
    seconds = time.perf_counter() - start
    os.sync()
    return _nbytes(output), seconds, time.perf_counter() - start, *_peaks()


def _copy(source: Path, target: Path) -> Row:
    """`cp` of as many of the files as fit."""
    target.mkdir()
    room, files = shutil.disk_usage(target).free - _SPARE_BYTES, []
    for file in sorted(source.glob("*.safetensors")):
        if sum(f.stat().st_size for f in files) + file.stat().st_size < room:
            files.append(file)
    if not files:
        raise OSError(f"{target}: no room to copy a file of {source}; give a smaller --size_gb or --source elsewhere")
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", *map(str, files), str(target)], check=True)
    seconds = time.perf_counter() - start
    os.sync()
    synced = time.perf_counter() - start
    nbytes = _nbytes(target)
    shutil.rmtree(target)
    return nbytes, seconds, synced, 0, 0


def _published(source: Path, output: Path, max_bytes: int, device: torch.device) -> Row:
    """The published scheme, plainly: load a shard, dequantise tensor by tensor, save; one thread."""
    if device.type == "cuda":
        from coati_ext.kernel.fp8_cast_triton import dequantize_fp8_one_block_per_program as dequantize

        dequantize(torch.zeros(1, 1, device=device).to(torch.float8_e4m3fn), torch.ones(1, 1, device=device))
    else:
        torch.set_num_threads(1)
        dequantize = dequantize_fp8_reference
    output.mkdir()
    where = {name: entry.file for name, entry in read_checkpoint(source).tensors.items()}
    loaded: dict[Path, dict[str, torch.Tensor]] = {}

    def tensors_of(file: Path) -> dict[str, torch.Tensor]:
        if file not in loaded:
            loaded[file] = load_file(file, device=str(device))
        return loaded[file]

    start, read = time.perf_counter(), 0
    for file in sorted(set(where.values())):
        if read >= max_bytes:
            break
        read += file.stat().st_size
        made = {}
        for name, weight in tensors_of(file).items():
            if name.endswith(SCALE_SUFFIX):
                continue
            if weight.element_size() == 1:
                made[name] = dequantize(weight, tensors_of(where[name + SCALE_SUFFIX])[name + SCALE_SUFFIX])
            else:
                made[name] = weight
        save_file(made, output / file.name, metadata={"format": "pt"})
        while len(loaded) > _KEPT_SHARDS:
            del loaded[next(iter(loaded))]
    seconds = time.perf_counter() - start
    os.sync()
    return _nbytes(output), seconds, time.perf_counter() - start, *_peaks()


def _median_seconds(function: Callable[[], object], device: torch.device, repeats: int = 11) -> float:
    """Of one call; on a GPU of several in a row, so that launching one overlaps with the one before."""
    calls = 10 if device.type == "cuda" else 1
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                function()
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end) / 1e3 / calls)
        else:
            begin = time.perf_counter()
            function()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def _peaks() -> tuple[int, int]:
    peaks = own_peaks()
    return peaks.host, peaks.device_reserved


def _nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _read_all(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def _filesystem(folder: Path) -> str:
    """Type and device of the mount that holds the folder."""
    folder = folder.resolve()
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    device, point, kind = max((m for m in mounts if folder.is_relative_to(m[1])), key=lambda m: len(m[1]))
    return f"{kind} on {device}, mounted at {point}"
