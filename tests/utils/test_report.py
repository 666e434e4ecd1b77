"""The report of a run, and the samples that it shows: nothing that a model wrote may act on a terminal or a page."""

import base64
import json
import math
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser

import numpy
import pytest

from coati_ext.trainer.state import drop_later_lines
from coati_ext.utils import report, report_picture
from coati_ext.utils.report import SampleRow, SamplesLog, format_samples, read_curves, write_report
from coati_ext.utils.report_picture import PANELS, draw, smooth

HOSTILE = "</td><script src=http://a.b/c>alert('1')</script>\x1b]0;title\x07\x9b31m\u202e\ud83d&amp;"


def sample(**changed) -> SampleRow:
    fields = {
        "prompt": "2+2?", "completion": "four\n\\boxed{4}", "gold": "4", "reward": 10.0, "accuracy": 1.0,
        "reason": "correct", "length": 7, "truncated": False, "parts": {"format": 1.0, "answer": 9.0},
    }  # fmt: skip
    return SampleRow(**{**fields, **changed})


def columns(line: str) -> int:
    return len(line) + sum(line.count(wide) for wide in "四十二👍")


def write_metrics(run_dir, rows, end=""):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


def write_samples(run_dir, step, rows):
    log = SamplesLog(run_dir / "samples.jsonl", interval=1, enabled=True)
    log.add(step, rows)
    log.close()


class Page(HTMLParser):
    """Tables as lists of rows of text, and every tag and attribute."""

    def __init__(self, file):
        super().__init__()
        self.tables, self.tags, self.attributes, self.in_cell = [], [], [], False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self.in_cell:
            self.tables[-1][-1][-1] += data


@pytest.fixture
def drawn(monkeypatch):
    """The panels drawn, each as its axes by title: what matplotlib was given, not what it painted."""
    panels = {}
    draw_panel = report_picture._draw_panel

    def record(axes, panel, curves):
        draw_panel(axes, panel, curves)
        panels[panel.title] = axes

    monkeypatch.setattr(report_picture, "_draw_panel", record)
    return panels


def lines_of(axes) -> dict:
    return {line.get_label(): line.get_ydata() for line in axes.get_lines() if not line.get_label().startswith("_")}


def test_the_page_has_the_picture_the_summary_both_ends_and_the_last_samples(tmp_path):
    write_metrics(tmp_path, [{"step": step, "reward": step / 4, "layers": [1, 2]} for step in (1, 2, 3)])
    write_samples(tmp_path, 1, [sample(completion="an early one")])
    write_samples(tmp_path, 3, [sample(), sample(reward=None, accuracy=None, parts={}, gold=[1, "x"])])
    png, page = write_report(tmp_path, title="a run", summary={"seconds": 1.5, "problems": ["a", "b"], "none": None})
    assert (png, page) == (tmp_path / "report.png", tmp_path / "report.html")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert struct.unpack(">I", png.read_bytes()[16:20]) == (1200,)
    embedded = re.search(r'src="data:image/png;base64,([^"]*)"', page.read_text(encoding="utf-8"))
    assert base64.b64decode(embedded[1]) == png.read_bytes()
    summary, metrics, samples = Page(page).tables
    assert summary[1:] == [["seconds", "1.5"], ["problems", "a, b"], ["none", "–"]]  # noqa: RUF001
    assert metrics[1:] == [["reward", "0.25", "1", "0.75", "3"]]
    assert [row[3] for row in samples] == ["reward", "10", "–"]  # noqa: RUF001
    assert samples[1][:3] == ["2+2?", "four\n\\boxed{4}", "4"] and samples[1][-1] == "format 1, answer 9"
    assert samples[2][2] == "1, x"


def test_nothing_acts_on_the_page(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "reward": 1.0, HOSTILE.replace("\ud83d", ""): 2.0}])
    text = {name: HOSTILE for name in ("prompt", "completion", "gold", "reason")}
    write_samples(tmp_path, 1, [sample(**text, parts={HOSTILE: 1.0})])
    page = write_report(tmp_path, title=HOSTILE, summary={HOSTILE: HOSTILE})[-1]
    parsed, source = Page(page), page.read_text(encoding="utf-8")
    assert set(parsed.tags) == {
        "html", "meta", "title", "style", "h1", "h2", "table", "tr", "th", "td", "div", "p", "img",
    }  # fmt: skip
    assert {name for name, _ in parsed.attributes} == {"lang", "charset", "http-equiv", "content", "alt", "src"}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", source)
    assert parsed.tables[2][1][1].startswith("</td><script") and parsed.tables[2][1][1].endswith("�&amp;")


def test_a_panel_is_drawn_if_one_of_its_tags_has_a_number(tmp_path, drawn):
    assert draw({"loss": {1: 2.0}, "kl": {1: math.nan}}, title="") is None and not drawn
    write_metrics(tmp_path, [{"step": 1, "loss": 2.0, "kl": None}])
    assert write_report(tmp_path, title="", summary={}) == [tmp_path / "report.html"]
    for panel in PANELS:
        for tag in panel.lines + panel.points + panel.right:
            drawn.clear()
            draw({"grad_norm": {1: math.nan}, tag: {1: 2.0}}, title="")
            assert list(drawn) == [panel.title], tag


def test_evaluations_are_points_in_the_order_of_k(drawn):
    tags = ["accuracy", "eval/pass@16", "eval/pass@4", "eval/accuracy", "eval/passing"]
    draw({tag: {0: 0.25, 5: 0.5} for tag in tags}, title="")
    assert list(lines_of(drawn["accuracy"])) == ["accuracy", "eval/accuracy", "eval/pass@4", "eval/pass@16"]
    styles = [(line.get_linestyle(), line.get_marker()) for line in drawn["accuracy"].get_lines()]
    assert styles == [("-", "."), ("None", "s"), ("None", "^"), ("None", "D")]


def test_the_band_is_the_deviation_of_the_episodes_that_have_one(drawn):
    draw({"reward": {1: 1.0, 2: 2.0, 3: 4.0}, "reward_std": {1: 0.5, 3: 1.0}}, title="")
    heights = drawn["reward"].collections[0].get_paths()
    assert sorted({tuple(point) for path in heights for point in path.vertices.tolist()}) == [
        (1, 0.5), (1, 1.5), (3, 3.0), (3, 5.0),
    ]  # fmt: skip


def test_the_truncated_fraction_has_its_own_axis(drawn):
    draw({"length/mean": {1: 200.0}, "length/truncated": {1: 0.5}}, title="")
    assert list(lines_of(drawn["completion length"])) == ["length/mean"]
    other = drawn["completion length"].figure.axes[1]
    assert list(lines_of(other)) == ["length/truncated"] and other.get_ylim()[1] < 1.1
    legend = drawn["completion length"].get_legend().get_texts()
    assert [text.get_text() for text in legend] == ["length/mean", "length/truncated"]


@pytest.mark.parametrize("num_points, num_lines", [(30, 1), (31, 2)])
def test_more_than_thirty_points_are_averaged_over_the_raw_ones(drawn, num_points, num_lines):
    curve = {step: float(step % 2) for step in range(num_points)}
    draw({"kl": curve}, title="")
    lines = drawn["KL"].get_lines()
    assert len(lines) == num_lines
    assert lines[0].get_ydata().tolist() == list(curve.values())
    if num_lines == 2:
        assert lines[1].get_ydata() == pytest.approx(smooth(numpy.array(list(curve.values()))))


def test_a_mean_knows_no_neighbour_beyond_its_window_and_no_nan():
    values = numpy.arange(400.0) ** 2  # a window of 21
    values[[7, 200]] = numpy.nan
    expected = [numpy.nanmean(values[max(i - 10, 0) : i + 11]) for i in range(400)]
    got = smooth(values)
    assert numpy.isnan(got[[7, 200]]).all()
    known = ~numpy.isnan(values)
    numpy.testing.assert_allclose(got[known], numpy.array(expected)[known], rtol=1e-12)
    spike = numpy.ones(400)
    spike[0] = 1e30  # would leave rounding errors of 1e14 in running sums
    assert smooth(spike)[11:].tolist() == [1.0] * 389


def test_a_null_is_a_gap(tmp_path, drawn):
    write_metrics(tmp_path, [{"step": 1, "kl": 1.0}, {"step": 2, "kl": None}, {"step": 3, "kl": 2.0}])
    draw(read_curves(tmp_path / "metrics.jsonl"), title="")
    numpy.testing.assert_array_equal(lines_of(drawn["KL"])["kl"], [1.0, math.nan, 2.0])


def test_a_title_is_no_formula():
    assert draw({"kl": {1: 1.0}}, title=r"costs $\frac{$")


@pytest.mark.parametrize("value", [3.4e38, 1.7e308, -1.7e308])
def test_a_run_that_diverged_has_its_picture(value):
    tags = ("reward", "reward_std", "kl", "length/truncated")
    assert draw({tag: {step: value * (step % 2) for step in range(40)} for tag in tags}, title="")


def test_episodes_are_integers_even_when_there_is_one(drawn):
    draw({"kl": {3: 1.0}, "entropy": {1: 1.0, 2: 2.0}}, title="")
    for axes in drawn.values():
        assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_lines_of_a_step_are_one_episode_in_order(tmp_path):
    rows = [{"step": 2, "kl": 1.0}, {"step": 2, "eval/reward": 3, "flag": True, "kl": 2.0}, {"step": 1, "kl": 0.0}]
    write_metrics(tmp_path, rows)
    curves = read_curves(tmp_path / "metrics.jsonl")
    assert curves == {"kl": {1: 0.0, 2: 2.0}, "eval/reward": {2: 3.0}} and list(curves["kl"]) == [1, 2]


@pytest.mark.parametrize("end", ['{"step": 2, "kl": 1', '{"step": 2, "t": "\N{MIDDLE DOT}'.encode()[:-1], "12", "\n"])
def test_a_last_line_that_was_cut_is_left_out(tmp_path, end):
    write_metrics(tmp_path, [{"step": 1, "kl": 0.5}])
    write_samples(tmp_path, 1, [sample()])
    end = end if isinstance(end, bytes) else end.encode()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(end)
    page = Page(write_report(tmp_path, title="", summary={})[-1])
    assert page.tables[1][1:] == [["kl", "0.5", "1", "0.5", "1"]] and len(page.tables[2]) == 2


def test_what_cannot_be_reported_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.jsonl is missing"):
        write_report(tmp_path, title="", summary={})
    write_metrics(tmp_path, [], end='{"step": 1')
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no episode"):
        write_report(tmp_path, title="", summary={})
    write_metrics(tmp_path, [{"step": 1}, {"kl": 1.0}, {"step": 3}])
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected a JSON object with a step"):
        write_report(tmp_path, title="", summary={})


def test_without_matplotlib_there_is_a_page_and_one_line_that_says_why(tmp_path, monkeypatch, capsys):
    for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    write_metrics(tmp_path, [{"step": 1, "reward": 1.0}])
    assert write_report(tmp_path, title="a run", summary={}) == [tmp_path / "report.html"]
    assert not (tmp_path / "report.png").exists() and "<img" not in (tmp_path / "report.html").read_text()
    out = capsys.readouterr().out
    assert "pip install 'coati_ext[grpo]'" in out and out.count("\n") == 1


def test_the_state_of_matplotlib_is_not_touched(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "reward": 1.0}])
    code = f"""
import sys, matplotlib
from coati_ext.utils.report import write_report
before = list(dict.items(matplotlib.rcParams))  # reading it by key imports pyplot, to find a backend
assert len(write_report({str(tmp_path)!r}, title="$x", summary={{}})) == 2
assert list(dict.items(matplotlib.rcParams)) == before and "matplotlib.pyplot" not in sys.modules
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_a_large_step_shows_some_samples_and_says_of_how_many(tmp_path):
    write_metrics(tmp_path, [{"step": 1}])
    write_samples(tmp_path, 1, [sample()] * (report.MAX_SAMPLES + 1))
    page = write_report(tmp_path, title="", summary={})[-1]
    assert "Samples of episode 1, 50 of 51" in page.read_text(encoding="utf-8")
    assert len(Page(page).tables[2]) == 1 + report.MAX_SAMPLES


def test_samples_are_written_first_and_every_interval_and_at_once(tmp_path):
    file = tmp_path / "samples.jsonl"
    log = SamplesLog(file, interval=2, last_step=7, enabled=True)
    assert log.due(7) and not log.due(5)
    for step in range(1, 5):
        assert log.due(step) == (step == 1 or step % 2 == 0)
        log.add(step, [sample(completion="a\u2028b\ud83d"), sample(reward=math.nan, parts={"x": math.inf})])
        assert len(file.read_text().splitlines()) == 2 + step // 2 * 2  # before it is closed
    log.close()
    first, second = [json.loads(line) for line in file.read_text().splitlines()[:2]]
    assert list(first) == [
        "step", "prompt", "completion", "gold", "reward", "accuracy", "reason", "length", "truncated", "parts",
    ]  # fmt: skip
    assert (first["step"], first["completion"]) == (1, "a\u2028b\ud83d")
    assert second["reward"] is None and second["parts"] == {"x": None}


@pytest.mark.parametrize("changed", [{"interval": 0}, {"enabled": False}])
def test_a_log_that_is_off_makes_no_file(tmp_path, changed):
    log = SamplesLog(tmp_path / "samples.jsonl", **{"interval": 1, "enabled": True, **changed})
    log.add(1, [sample()])
    log.close()
    assert not log.due(1) and not list(tmp_path.iterdir())


def test_a_negative_interval_is_refused(tmp_path):
    with pytest.raises(ValueError, match="interval of the samples is -1"):
        SamplesLog(tmp_path / "samples.jsonl", interval=-1, enabled=True)


def test_a_continued_run_drops_later_samples(tmp_path):
    """Line separators in a completion must not split its line."""
    file = tmp_path / "samples.jsonl"
    for step in (1, 2, 3):
        write_samples(tmp_path, step, [sample(completion="a\u2028b\x85c")] * 2)
    with open(file, "a") as log:
        log.write('{"step": 4, "pro')
    drop_later_lines(file, 2)
    write_samples(tmp_path, 3, [sample()])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3]
    assert rows[0]["completion"] == "a\u2028b\x85c"


def test_the_table_shows_the_end_of_each_completion():
    rows = [
        sample(), sample(completion="x" * 90 + "\r\n the end", reward=None, reason="gold_unparseable", gold=12),
    ]  # fmt: skip
    assert format_samples(rows, 70).splitlines() == [
        "reward  reason            length  gold  end of completion",
        "    10  correct                7  4     four⏎\\boxed{4}",
        "     –  gold_unparseable       7  12    …xxxxxxxxxxxxxxxxxxxx⏎ the end",  # noqa: RUF001
    ]


def test_what_was_cut_is_marked_even_if_it_shrinks_to_one_line():
    line = format_samples([sample(completion="start" + "\r\n" * 300)], 100).splitlines()[1]
    assert re.search("  …⏎+$", line) and len(line) == 100


@pytest.mark.parametrize("width", [0, 1, 7, 30, 48, 49, 60, 100])
def test_no_line_is_wider_than_asked(width):
    texts = ["四" * 300, HOSTILE * 9, "\r\n" * 300, "e\u0301" * 200, "x" * 100_000, "", "👍\u200d" * 90]
    rows = [sample(completion=text, gold=text, reward=-1 / 3) for text in texts]
    rows.append(sample(reason="四" * 100))
    lines = format_samples(rows, width).split("\n")
    assert len(lines) == 1 + len(rows)
    assert all(columns(line) <= width for line in lines)


def test_nothing_acts_on_the_terminal():
    rows = [sample(completion="ok " + HOSTILE + "\r\b\t\u2066\u2028\x00", gold=HOSTILE, reason=HOSTILE)]
    table = format_samples(rows, 400)
    assert all(char.isprintable() or char == "\n" for char in table) and table.count("\n") == 1
    table.encode()  # no half surrogate pair
    assert "�]0;title��31m��&amp;�� ���" in table


def test_the_columns_line_up_after_wide_characters():
    lines = format_samples([sample(gold="四十二", completion="END"), sample(completion="END")], 80).splitlines()
    starts = {columns(line[: line.index("END" if "END" in line else "end of")]) for line in lines}
    assert len(starts) == 1
