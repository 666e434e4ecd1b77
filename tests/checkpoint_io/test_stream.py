"""The streaming engine: what is written, what is continued, and what is left when it fails."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coati_ext.checkpoint_io import stream
from coati_ext.checkpoint_io.checkpoint import Checkpoint, read_checkpoint
from coati_ext.checkpoint_io.resumable import JOURNAL_NAME, resumable_directory
from coati_ext.checkpoint_io.stream import OutputShard, Strip, TensorSpec, row_spans, rows_of, rows_to

CPU = [torch.device("cpu")]
NUM_SHARDS = 5


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    folder = tmp_path / "in"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for i in range(NUM_SHARDS):
        tensors = {f"{i}.w": torch.randn(3, 50 + i, 33, generator=generator), f"{i}.b": torch.randn(7).half()}
        tensors[f"{i}.none"] = torch.empty(0, 4)
        save_file(tensors, folder / f"{i}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return read_checkpoint(folder)


@pytest.fixture
def small_strips(monkeypatch):
    monkeypatch.setattr(stream, "STRIP_ELEMENTS", 33 * 8)


class Doubled:
    """Doubles the 3-D tensors into bf16 and copies the others; counts, and fails on the strip numbered `fail_at`."""

    def __init__(self, checkpoint: Checkpoint, fail_at: int | None = None) -> None:
        self.count, self._fail_at, self._lock = 0, fail_at, threading.Lock()
        self.shards = []
        for name, entries in checkpoint.shards.items():
            shard = OutputShard(name=name)
            for entry in entries:
                if len(entry.shape) == 3:
                    spec = TensorSpec(name=entry.name, dtype=torch.bfloat16, shape=entry.shape)
                    places = [(m, *span) for m in range(3) for span in row_spans(*entry.shape[1:], multiple=4)]
                    strips = [
                        Strip(sources=(rows_of(entry, *p),), targets=(rows_to(spec, *p),), convert=self._double)
                        for p in places
                    ]
                    shard.add([spec], strips)
                else:
                    shard.copy(entry)
            self.shards.append(shard)

    def _double(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        with self._lock:
            self.count += 1
            if self.count == self._fail_at:
                raise ValueError("strip refused")
        targets[0].copy_(sources[0] * 2)

    def run(self, output: Path, *, identity: str = "x", overwrite: bool = False, **kwargs) -> None:
        with resumable_directory(output, identity={"tool": identity}, overwrite=overwrite) as directory:
            stream.run(self.shards, directory, devices=CPU, num_workers=3, **kwargs)
            (directory.path / "config.json").write_text("{}")


def check_output(checkpoint: Checkpoint, output: Path) -> None:
    assert {file.name for file in output.iterdir()} == {*checkpoint.shards, "config.json"}
    for name in checkpoint.shards:
        before, after = load_file(checkpoint.directory / name), load_file(output / name)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(after[key], (value * 2).bfloat16() if value.dim() == 3 else value), key


def test_writes_what_was_planned(checkpoint, small_strips, tmp_path):
    done = []
    doubled = Doubled(checkpoint)
    doubled.run(tmp_path / "out", progress=done.append)
    check_output(checkpoint, tmp_path / "out")
    assert sum(done) == sum(shard.nbytes for shard in doubled.shards)
    assert doubled.count > 3 * NUM_SHARDS  # many strips a matrix


@pytest.mark.parametrize("fail_at", [1, 20, 60, 100])
def test_a_failed_run_is_continued(checkpoint, small_strips, tmp_path, fail_at):
    first = Doubled(checkpoint, fail_at)
    with pytest.raises(ValueError, match="strip refused"):
        first.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    work = tmp_path / "out.incomplete"
    finished = sorted(work.glob("*.safetensors")) if work.exists() else []
    assert not list(work.glob("*.part"))
    second = Doubled(checkpoint)
    second.run(tmp_path / "out")
    check_output(checkpoint, tmp_path / "out")
    whole = Doubled(checkpoint)
    whole.run(tmp_path / "again")
    strips_of_finished = sum(s.convert is not None for f in finished for s in whole.shards[int(f.stem)].strips)
    assert second.count == whole.count - strips_of_finished
    assert finished or fail_at < 60


def interrupted(checkpoint: Checkpoint, output: Path) -> Path:
    with pytest.raises(ValueError, match="strip refused"):
        Doubled(checkpoint, 100).run(output)
    return output.with_name(output.name + ".incomplete")


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip_last_byte,
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b"\0" * file.stat().st_size),
        Path.unlink,
    ],
    ids=["flipped", "cut", "zeroed", "deleted"],
)
def test_a_finished_file_that_was_damaged_is_made_again(checkpoint, small_strips, tmp_path, damage):
    work = interrupted(checkpoint, tmp_path / "out")
    damage(work / "0.safetensors")
    Doubled(checkpoint).run(tmp_path / "out")
    check_output(checkpoint, tmp_path / "out")


def test_a_journal_cut_short_loses_its_last_line_only(checkpoint, small_strips, tmp_path):
    work = interrupted(checkpoint, tmp_path / "out")
    journal = work / JOURNAL_NAME
    journal.write_text(journal.read_text()[:-5])
    Doubled(checkpoint).run(tmp_path / "out")
    check_output(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("line", ["[1]", "7", '{"file": 1}', "\\x00", "{"])
def test_a_damaged_journal_is_named(checkpoint, small_strips, tmp_path, line):
    work = interrupted(checkpoint, tmp_path / "out")
    with (work / JOURNAL_NAME).open("a") as journal:
        journal.write(line + "\n")
    with pytest.raises(FileExistsError, match=r"journal\.jsonl is damaged"):
        Doubled(checkpoint).run(tmp_path / "out")


def test_another_conversion_is_not_continued(checkpoint, small_strips, tmp_path):
    work = interrupted(checkpoint, tmp_path / "out")
    with pytest.raises(FileExistsError, match="left by a run with another tool"):
        Doubled(checkpoint).run(tmp_path / "out", identity="y")
    assert (work / "0.safetensors").exists()
    again = Doubled(checkpoint)
    again.run(tmp_path / "out", identity="y", overwrite=True)
    assert again.count == sum(s.convert is not None for shard in again.shards for s in shard.strips)
    check_output(checkpoint, tmp_path / "out")


def test_an_existing_output_is_kept_unless_told(checkpoint, tmp_path):
    Doubled(checkpoint).run(tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(FileExistsError, match="pass --overwrite"):
        Doubled(checkpoint).run(tmp_path / "out")
    Doubled(checkpoint).run(tmp_path / "out", overwrite=True)
    check_output(checkpoint, tmp_path / "out")
    other = tmp_path / "home"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="not a model directory: not overwritten"):
        Doubled(checkpoint).run(other, overwrite=True)


def test_an_output_that_holds_an_input_is_not_replaced(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    inside = {"inputs": [checkpoint.directory], "overwrite": True}
    for output in (tmp_path, checkpoint.directory, checkpoint.directory / "sub"):
        with pytest.raises(ValueError, match="input"), resumable_directory(output, identity={}, **inside):
            pass
    assert read_checkpoint(checkpoint.directory).nbytes == checkpoint.nbytes


def test_an_output_that_appears_meanwhile_is_kept(tmp_path):
    with (
        pytest.raises(FileExistsError, match="exists and is not empty"),
        resumable_directory(tmp_path / "out", identity={}) as work,
    ):
        (work.path / "config.json").write_text("{}")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("x")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "x"


def test_a_neighbour_with_a_likely_name_is_kept(checkpoint, tmp_path):
    (tmp_path / ".out.old").mkdir()
    Doubled(checkpoint).run(tmp_path / "out")
    Doubled(checkpoint).run(tmp_path / "out", overwrite=True)
    assert sorted(f.name for f in tmp_path.iterdir()) == [".out.old", "in", "out"]


def test_files_of_others_in_the_way_are_kept(checkpoint, tmp_path):
    work = tmp_path / "out.incomplete"
    work.mkdir()
    (work / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="is not an unfinished run's"):
        Doubled(checkpoint).run(tmp_path / "out", overwrite=True)
    assert (work / "thesis.tex").read_text() == "x"


def test_two_runs_do_not_write_the_same_output(checkpoint, tmp_path):
    with (
        resumable_directory(tmp_path / "out", identity={}),
        pytest.raises(RuntimeError, match="another process is writing"),
    ):
        Doubled(checkpoint).run(tmp_path / "out")


def test_a_full_disk_is_found_before_any_work(checkpoint, tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: Usage)
    doubled = Doubled(checkpoint)
    with pytest.raises(OSError, match=r"has 1\.0 KB free"):
        doubled.run(tmp_path / "out")
    assert doubled.count == 0
    assert not (tmp_path / "out.incomplete").exists()


def test_an_input_that_shrinks_is_named(checkpoint, tmp_path):
    doubled = Doubled(checkpoint)
    file = checkpoint.directory / "3.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"3\.safetensors ends at byte 200, while it is being read"):
        doubled.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plan_with_a_hole_is_refused(checkpoint, tmp_path):
    doubled = Doubled(checkpoint)
    doubled.shards[2].strips.pop(0)
    with pytest.raises(AssertionError, match="hole"):
        doubled.run(tmp_path / "out")
