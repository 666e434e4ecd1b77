"""The curves of a GRPO run as one PNG, a panel for each thing to watch."""

import io
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = dict[int, float]
"""Episode -> value, in order; NaN where the value is null."""

# Of Okabe and Ito's palette, told apart under every form of colour blindness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_MAX_VALUE = 1e100  # the ticks of an axis overflow near the largest double
_SMOOTH_FROM = 31  # points
_MAX_COLUMNS, _PANEL_INCHES, _DPI = 3, (4.0, 3.1), 100  # 1200 pixels wide


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    lines: tuple[str, ...]
    points: tuple[str, ...] = ()
    """Tags measured now and then; one that ends in @ stands for all that begin so."""
    band: str | None = None
    """Tag of the standard deviation around the first line."""
    right: tuple[str, ...] = ()
    """Fractions, on an axis of their own."""


PANELS = (
    Panel(title="reward", lines=("reward",), points=("eval/reward",), band="reward_std"),
    Panel(title="accuracy", lines=("accuracy",), points=("eval/accuracy", "eval/pass@")),
    Panel(title="completion length", lines=("length/mean", "length/max"), right=("length/truncated",)),
    Panel(title="policy entropy", lines=("entropy",)),
    Panel(title="KL", lines=("kl", "mismatch_kl")),
    Panel(title="clipped ratios", lines=("clip_low", "clip_high")),
    Panel(title="gradient norm", lines=("grad_norm",)),
    Panel(title="tokens per second", lines=("tokens_per_s/generate", "tokens_per_s/train")),
    Panel(title="groups of equal rewards", lines=("zero_variance",)),
)


def draw(curves: Mapping[str, Curve], *, title: str) -> bytes | None:
    """The panels whose tags have a number, as a PNG; None if none has. Touches no global state of matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {tag: curve for tag, curve in curves.items() if not all(map(math.isnan, curve.values()))}
    panels = [panel for panel in PANELS if any(_present(panel.lines + panel.points + panel.right, curves))]
    if not panels:
        return None
    num_columns = min(_MAX_COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(_MAX_COLUMNS * width, num_rows * height + 0.4), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    # Not wrap=True, which reads formulas in spite of parse_math=False.
    figure.suptitle(textwrap.fill(title, 110, max_lines=2, placeholder=" …"), parse_math=False)
    for place, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(num_rows, num_columns, place), panel, curves)
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()


def smooth(values: numpy.ndarray) -> numpy.ndarray:
    """The mean over up to 51 neighbours, a twentieth of the curve; NaN stays NaN and enters no mean.

    Example:
        >>> smooth(numpy.array([1.0, 2.0, numpy.nan, 4.0, 6.0])).tolist()
        [1.5, 2.3333333333333335, nan, 4.0, 5.0]
    """
    window = numpy.ones(min(max(5, len(values) // 20 | 1), 51))
    known = numpy.isfinite(values)
    sums = numpy.convolve(numpy.where(known, values, 0.0), window, mode="same")
    counts = numpy.convolve(known, window, mode="same")
    return numpy.where(known, sums / numpy.maximum(counts, 1), numpy.nan)


def _present(names: tuple[str, ...], curves: Mapping[str, Curve]) -> list[str]:
    """The tags that have a curve, those of a prefix with @ by the number after it."""
    found = []
    for name in names:
        matching = [tag for tag in curves if tag == name or (name.endswith("@") and tag.startswith(name))]
        found += sorted(matching, key=lambda tag: (len(tag), tag))
    return found


def _draw_panel(axes: "Axes", panel: Panel, curves: Mapping[str, Curve]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.set_xlabel("episode")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.grid(alpha=0.25)
    styles = iter(zip(_COLOURS * 4, _MARKERS * 4, strict=True))
    for tag in _present(panel.lines, curves):
        colour, _ = next(styles)
        band = curves.get(panel.band) if tag == panel.lines[0] else None
        _draw_line(axes, tag, curves[tag], colour, band=band)
    for tag in _present(panel.points, curves):
        colour, marker = next(styles)
        axes.plot(*_arrays(curves[tag]), marker, label=tag, color=colour, markersize=5)
    handles, labels = axes.get_legend_handles_labels()
    if right := _present(panel.right, curves):
        other = axes.twinx()
        other.set_ylim(-0.02, 1.02)
        other.set_ylabel("fraction")
        for tag in right:
            _draw_line(other, tag, curves[tag], next(styles)[0], style="--")
        handles, labels = (a + b for a, b in zip((handles, labels), other.get_legend_handles_labels(), strict=True))
    axes.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, fontsize=8, frameon=False,
        columnspacing=1.0, handlelength=1.6,
    )  # fmt: skip


def _draw_line(
    axes: "Axes", tag: str, curve: Curve, colour: str, *, band: Curve | None = None, style: str = "-"
) -> None:
    """Many points as their moving average before the raw values, few as they are."""
    episodes, values = _arrays(curve)
    _, spread = _arrays({episode: (band or {}).get(episode, math.nan) for episode in curve})
    marker = "."
    if len(values) >= _SMOOTH_FROM:
        axes.plot(episodes, values, color=colour, alpha=0.3, linewidth=0.7, marker=".", markersize=2)
        values, spread, marker = smooth(values), smooth(spread), ""
    axes.plot(episodes, values, style, color=colour, linewidth=1.6, marker=marker, label=tag)
    if band:
        axes.fill_between(episodes, values - spread, values + spread, color=colour, alpha=0.15, linewidth=0)


def _arrays(curve: Curve) -> tuple[numpy.ndarray, numpy.ndarray]:
    values = numpy.array(list(curve.values()), dtype=float)
    return numpy.array(list(curve), dtype=float), values.clip(-_MAX_VALUE, _MAX_VALUE)
