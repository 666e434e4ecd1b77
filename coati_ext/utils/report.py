"""What a GRPO run shows people: completions with their rewards as it goes, one picture and one HTML page at its end."""

import base64
import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from coati_ext.utils.launch import print_rank_0
from coati_ext.utils.printable import clip, clip_start, num_columns, one_line, printable
from coati_ext.utils.report_picture import Curve, draw
from coati_ext.utils.run_directory import METRICS_FILE, PAGE_FILE, PICTURE_FILE, SAMPLES_FILE

MAX_SAMPLES = 50  # on the page, whose size they make
_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222 }
img { width: 100%; height: auto }
table { border-collapse: collapse } th, td { border: 1px solid #ccc; padding: .3em .6em; text-align: left }
th { background: #f3f3f3 } td { vertical-align: top }
td div { max-width: 28em; max-height: 20em; overflow: auto; white-space: pre-wrap; overflow-wrap: break-word }
"""


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """One completion and what it was paid."""

    prompt: str
    completion: str
    gold: Any
    """What JSON can hold."""
    reward: float | None
    """None where the sample was left out of training; `accuracy` likewise where nothing was judged."""
    accuracy: float | None
    reason: str
    length: int
    """Tokens of the completion."""
    truncated: bool
    parts: dict[str, float]


class SamplesLog:
    """Appends samples to a JSONL file, a line each with its `step`; does nothing on other ranks.

    A continued run first cuts the file after the step that it takes up (`coati_ext.trainer.state.drop_later_lines`),
    then makes this object, which holds the file open.

    Args:
        interval: steps between writes, beside those of step 1 and `last_step`; 0 writes never.
        enabled: true on rank 0 only.
    """

    def __init__(self, path: str | Path, *, interval: int, last_step: int | None = None, enabled: bool):
        if interval < 0:
            raise ValueError(f"interval of the samples is {interval}; expected steps between writes, or 0 for never")
        self.interval, self.last_step = interval, last_step
        # Held open for the run, closed in close.
        self._file = open(path, "a", encoding="utf-8") if enabled and interval else None  # noqa: SIM115

    def due(self, step: int) -> bool:
        """Whether `add` would write at this step: rows for other steps need not be made."""
        return self._file is not None and (step in (1, self.last_step) or step % self.interval == 0)

    def add(self, step: int, rows: Iterable[SampleRow]) -> None:
        """Write and flush the rows if they are due; numbers that are not finite become null."""
        if not self.due(step):
            return
        lines = [json.dumps({"step": step, **_finite(asdict(row))}, allow_nan=False) + "\n" for row in rows]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def format_samples(rows: Sequence[SampleRow], width: int = 100) -> str:
    """A table for the terminal: reward, reason, length, gold, and the end of the completion with newlines as ⏎.

    No line is wider than `width` columns, East Asian text included; what a terminal would obey is shown as �.
    """
    cells = [["reward", "reason", "length", "gold", "end of completion"]]
    for row in rows:
        gold, end = one_line(_shown(row.gold)), one_line(row.completion[-2 * max(width, 1) :])
        cells.append([_shown(row.reward), one_line(row.reason), _shown(row.length), clip(gold, 20), end])
    sizes = [max(num_columns(row[i]) for row in cells) for i in range(4)]
    left = width - sum(sizes) - 2 * len(sizes)
    lines = []
    for row in cells:
        gaps = [" " * (size - num_columns(cell)) for cell, size in zip(row, sizes, strict=False)]
        reward, reason, length, gold, end = row
        columns = [gaps[0] + reward, reason + gaps[1], gaps[2] + length, gold + gaps[3], clip_start(end, left)]
        lines.append(clip("  ".join(columns).rstrip(), width))
    return "\n".join(lines)


def write_report(run_dir: str | Path, *, title: str, summary: Mapping[str, Any]) -> list[Path]:
    """Write report.png and report.html from metrics.jsonl and samples.jsonl; call it on one rank.

    The page needs no other file and no network. A last line that was cut short is left out, and samples may be absent.
    Without matplotlib there is no picture, and one printed line says so.

    Args:
        summary: shown as a table, in this order.

    Returns:
        The files written.

    Raises:
        ValueError: metrics.jsonl is missing or has no episode, or a line of either file, before the last, is no JSON
            object with a step.
    """
    run_dir = Path(run_dir)
    curves = read_curves(run_dir / METRICS_FILE)
    samples = _last_samples(run_dir / SAMPLES_FILE)
    written = []
    try:
        png = draw(curves, title=printable(title))
    except ImportError as error:
        png = None
        print_rank_0(f"the report has no picture ({error}): pip install 'coati_ext[grpo]'")
    if png is not None:
        written.append(run_dir / PICTURE_FILE)
        written[0].write_bytes(png)
    page = run_dir / PAGE_FILE
    page.write_text(_page(title, summary, curves, samples, png), encoding="utf-8")
    return [*written, page]


def read_curves(file: Path) -> dict[str, Curve]:
    """By tag, the numbers of a metrics file; lines of the same step are one episode, and its later value holds.

    Raises:
        ValueError: the file is missing or has no episode, or a line before the last is no JSON object with a step.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing: no episode was logged")
    curves: dict[str, Curve] = {}
    steps = set()
    for row in _read(file):
        steps.add(step := row.pop("step"))
        for tag, value in row.items():
            number = math.nan if value is None else value
            if isinstance(number, int | float) and not isinstance(number, bool):
                curves.setdefault(tag, {})[step] = float(number) if math.isfinite(number) else math.nan
    if not steps:
        raise ValueError(f"{file} has no episode to report")
    return {tag: dict(sorted(curve.items())) for tag, curve in curves.items()}


def _last_samples(file: Path) -> list[dict[str, Any]]:
    """The rows of the last step that has any."""
    rows: list[dict[str, Any]] = []
    for row in _read(file) if file.is_file() else ():
        if rows and row["step"] != rows[0]["step"]:
            rows.clear()
        rows.append(row)
    return rows


def _read(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file with steps, without a last line that was cut short."""
    broken = 0
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if broken:
                raise ValueError(f"{file}, line {broken}: expected a JSON object with a step")
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row
            else:
                broken = number


def _page(
    title: str,
    summary: Mapping[str, Any],
    curves: Mapping[str, Curve],
    samples: Sequence[Mapping[str, Any]],
    png: bytes | None,
) -> str:
    """The HTML, self-contained, which may load nothing."""
    name = html.escape(printable(title))
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; style-src '
        "'unsafe-inline'\">",
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n<h1>{name}</h1>",
        _table(("summary", ""), summary.items()),
    ]
    if png is not None:
        lines.append(f'<p><img alt="Curves of the run" src="data:image/png;base64,{base64.b64encode(png).decode()}">')
    ends = []
    for tag, curve in sorted(curves.items()):
        known = [(value, step) for step, value in curve.items() if not math.isnan(value)] or [(None, None)]
        ends.append((tag, *known[0], *known[-1]))
    lines += ["<h2>Metrics</h2>", _table(("metric", "first", "of episode", "last", "of episode"), ends)]
    if samples:
        heads = [field.name for field in fields(SampleRow)]
        shown = [[row.get(head) for head in heads] for row in samples[:MAX_SAMPLES]]
        part = f", {MAX_SAMPLES} of {len(samples)}" if len(samples) > MAX_SAMPLES else ""
        lines += [f"<h2>Samples of episode {samples[0]['step']}{part}</h2>", _table(heads, shown)]
    return "\n".join([*lines, "</html>\n"])


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(tag: str, row: Sequence[Any]) -> str:
        cells = (f"<{tag}><div>{html.escape(printable(_shown(cell)))}</div></{tag}>" for cell in row)
        return f"<tr>{''.join(cells)}</tr>"

    return "\n".join(["<table>", line("th", heads), *(line("td", row) for row in rows), "</table>"])


def _shown(value: Any) -> str:
    if value is None:
        return "–"  # noqa: RUF001
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    return ", ".join(map(_shown, value)) if isinstance(value, list | tuple) else str(value)


def _finite(value: Any) -> Any:
    """With None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
