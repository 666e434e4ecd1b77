"""Check an FP8 -> BF16 conversion against a dequantisation in float64 that shares no code with the converter.

The structure is checked for every tensor, the values for a sample or for all. An element is right if it is, to
the bit, the float64 product rounded to float32 and that to bf16.
"""

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from coati_ext.checkpoint_io.checkpoint import Checkpoint, read_checkpoint, read_json
from coati_ext.checkpoint_io.fp8_format import (
    FP8_DTYPES,
    SCALE_SUFFIX,
    Block,
    block_size,
    quantization_of,
    scale_rows_of,
    scales_of,
)
from coati_ext.checkpoint_io.fp8_to_bf16 import Mtp, mtp_tensors
from coati_ext.checkpoint_io.hf_directory import INDEX_NAME
from coati_ext.checkpoint_io.rewrite import WorkOptions
from coati_ext.checkpoint_io.safetensors_file import TensorEntry
from coati_ext.checkpoint_io.stream import STRIP_ELEMENTS, rows_of, spans
from coati_ext.checkpoint_io.workers import Source, Worker, bytes_of, run_tasks

SAMPLE_TENSORS = 256
_CHECK_ELEMENTS = STRIP_ELEMENTS // 16  # float64 copies are eight times as large as FP8
_HALF_STEP = 2.0**-9  # of bf16, relative to the power of two below the value
_SMALLEST = 2.0**-133  # the spacing of bf16 subnormals
_LISTED = 5


@dataclass(kw_only=True)
class VerifyReport:
    """What was compared; `problems` has one line for each tensor that is wrong."""

    num_tensors: int = 0
    num_compared: int = 0
    num_elements: int = 0
    max_error: float = 0.0
    """Largest error in half steps of bf16; at most 1 is perfect rounding."""
    problems: list[str] = field(default_factory=list)

    def format(self) -> str:
        """A few lines that end in PASS or FAIL."""
        lines = [
            f"verify: {self.num_tensors} tensors in place; values of {self.num_compared} compared "
            f"({self.num_elements / 1e6:.1f} M elements), largest error {self.max_error:.3f} of half a bf16 step"
        ]
        lines += [f"FAIL    {problem}" for problem in self.problems[:_LISTED]]
        if len(self.problems) > _LISTED:
            lines.append(f"FAIL    ... and {len(self.problems) - _LISTED} more")
        return "\n".join(lines if self.problems else [*lines, "PASS    the output is the input, in bf16"])


def verify_fp8_to_bf16(
    source: Checkpoint,
    output: Path,
    *,
    amount: Literal["sample", "all"],
    mtp: Mtp = "keep",
    options: WorkOptions,
    seed: int = 0,
) -> VerifyReport:
    """Compare `output` with what `source` says it must hold.

    Args:
        amount: "sample" compares the first and last strip of SAMPLE_TENSORS tensors, and of more if it takes more to
            have one of every shape and one of every file.

    Raises:
        FileNotFoundError, ValueError: one of the two is no readable checkpoint; names the file.
    """
    made = read_checkpoint(output)
    report = VerifyReport(problems=_wrong_structure(source, made, mtp=mtp))
    block = block_size(source)
    scales = scales_of(source, block)
    dropped = mtp_tensors(source) if mtp == "drop" else set()
    names = [n for n in source.tensors if n in made.tensors and n not in dropped and not n.endswith(SCALE_SUFFIX)]
    report.num_tensors = len(names)
    if report.problems:
        return report
    if amount == "sample":
        names = _sample([source.tensors[name] for name in names], seed)
    lock = threading.Lock()
    wrong: dict[str, str] = {}

    def record(name: str, errors: tuple[float, int], description: str) -> None:
        with lock:
            report.max_error = max(report.max_error, errors[0])
            report.num_elements += errors[1]
            if description:
                wrong.setdefault(name, description)

    tasks = [
        task
        for name in names
        for task in _tasks(source.tensors[name], made.tensors[name], scales.get(name), block, amount, record)
    ]
    with tqdm(total=len(tasks), desc="verify", disable=not options.show_progress) as bar:
        run_tasks(
            iter(tasks),
            devices=options.devices(),
            num_workers=options.num_workers,
            on_done=lambda _: bar.update(),
        )
    report.num_compared = len(names)
    report.problems += [f"{name}: {wrong[name]}" for name in sorted(wrong)]
    return report


def _wrong_structure(source: Checkpoint, made: Checkpoint, *, mtp: Mtp) -> list[str]:
    dropped = mtp_tensors(source) if mtp == "drop" else set()
    expected = {n: e for n, e in source.tensors.items() if not n.endswith(SCALE_SUFFIX) and n not in dropped}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - made.tensors.keys())]
    problems += [f"{name} should not be there" for name in sorted(made.tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & made.tensors.keys()):
        want, found = expected[name], made.tensors[name]
        dtype = torch.bfloat16 if want.dtype in FP8_DTYPES else want.dtype
        if (found.dtype, found.shape) != (dtype, want.shape):
            problems.append(f"{name} is {found.dtype} {list(found.shape)}, not {dtype} {list(want.shape)}")
    if quantization_of(made.config()) is not None:
        problems.append("config.json still has a quantization_config")
    if made.has_index:
        total = (read_json(made.directory / INDEX_NAME).get("metadata") or {}).get("total_size")
        if total != made.nbytes:
            problems.append(f"{INDEX_NAME} says total_size {total}, the tensors have {made.nbytes} bytes")
    return problems


def _sample(entries: list[TensorEntry], seed: int) -> list[str]:
    """Names: one of every dtype and shape and one of every file, then others at random."""
    generator = random.Random(seed)
    shuffled = generator.sample(entries, len(entries))
    of_shapes = {(entry.dtype, entry.shape): entry.name for entry in shuffled}
    of_files = {entry.file: entry.name for entry in shuffled}
    chosen = {*of_shapes.values(), *of_files.values()}
    others = [entry.name for entry in shuffled if entry.name not in chosen]
    return [*sorted(chosen), *others[: max(SAMPLE_TENSORS - len(chosen), 0)]]


Record = Callable[[str, tuple[float, int], str], None]


def _tasks(
    weight: TensorEntry,
    made: TensorEntry,
    scale: TensorEntry | None,
    block: Block,
    amount: str,
    record: Record,
) -> list[Callable[[Worker], None]]:
    if scale is None:
        pieces = list(spans(weight.nbytes, step=_CHECK_ELEMENTS))
        chosen = pieces if amount == "all" else _first_and_last(pieces)
        return [partial(_compare_bytes, weight, made, a, b, record) for a, b in chosen]
    *_, num_rows, num_columns = weight.shape
    rows = max(_CHECK_ELEMENTS // max(num_columns, 1) // block[0], 1) * block[0]
    strips = [(m, a, b) for m in range(math.prod(weight.shape[:-2])) for a, b in spans(num_rows, step=rows)]
    chosen = strips if amount == "all" else _first_and_last(strips)  # the last may hold ragged blocks
    return [partial(_compare_strip, weight, scale, made, strip, block, record) for strip in chosen]


def _first_and_last(pieces: list) -> list:
    return pieces if len(pieces) < 3 else [pieces[0], pieces[-1]]


def _compare_bytes(weight: TensorEntry, made: TensorEntry, a: int, b: int, record: Record, worker: Worker) -> None:
    read = [Source(file=e.file, start=e.start + a, dtype=torch.uint8, shape=(b - a,)) for e in (weight, made)]
    left, right = (bytes_of(tensor) for tensor in worker.read(read))
    record(weight.name, (0.0, (b - a) // weight.dtype.itemsize), "" if left == right else "differs from the input")


def _compare_strip(
    weight: TensorEntry,
    scale: TensorEntry,
    made: TensorEntry,
    strip: tuple[int, int, int],
    block: Block,
    record: Record,
    worker: Worker,
) -> None:
    matrix, start, stop = strip
    sources = [
        rows_of(weight, matrix, start, stop),
        scale_rows_of(scale, matrix, start, stop, block),
        rows_of(made, matrix, start, stop),
    ]
    host = worker.read(sources)
    with worker.on_device():
        quantised, scales, found = worker.to_device(host)
        error, num_wrong = errors_in_half_steps(quantised, scales, found, block)
    rows = f"rows {start} to {stop - 1}" + (f" of matrix {matrix}" if len(weight.shape) > 2 else "")
    description = f"{num_wrong} elements of {rows} are not the rounded product (worst: {error:.3g} half steps)"
    record(weight.name, (error, found.numel()), description if num_wrong else "")


def errors_in_half_steps(
    weight: torch.Tensor, scale_inv: torch.Tensor, found: torch.Tensor, block: Block
) -> tuple[float, int]:
    """(Largest error of `found` in half steps of bf16, number of elements that are no correct rounding).

    Args:
        weight: FP8, (N, M). scale_inv: (ceil(N/bn), ceil(M/bm)). found: bf16, (N, M). block: (bn, bm).
    """
    num_rows, num_columns = weight.shape
    scale = scale_inv.to(torch.float32).double()
    scale = scale.repeat_interleave(block[0], 0)[:num_rows].repeat_interleave(block[1], 1)[:, :num_columns]
    exact = weight.to(torch.float32).double() * scale
    rounded = exact.float().bfloat16()  # the product is exact in float64: two roundings, as the format's own arithmetic
    wrong = (found.view(torch.int16) != rounded.view(torch.int16)) & ~(found.isnan() & rounded.isnan())
    half_step = torch.ldexp(torch.full_like(exact, _HALF_STEP), torch.frexp(exact.abs()).exponent)
    half_step = torch.where(exact == 0, 0.0, half_step).clamp(min=_SMALLEST / 2)
    same_infinity = found.isinf() & (found == rounded)
    error = torch.where(
        same_infinity | (found.isnan() & rounded.isnan()), 0.0, (found.double() - exact).abs() / half_step
    )
    error = torch.where(error.isnan(), math.inf, error)  # NaN on one side only
    return error.max().item() if error.numel() else 0.0, int(wrong.sum())
