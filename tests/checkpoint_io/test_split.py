import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fp8_checkpoint import make_fp8_dir
from model_dir import make_model_dir
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from applications import split_checkpoint as command
from coati_ext.checkpoint_io import stream
from coati_ext.checkpoint_io.checkpoint import read_checkpoint
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.reshard import plan
from coati_ext.checkpoint_io.resumable import ResumableDirectory
from coati_ext.checkpoint_io.split import join_checkpoint, read_layout, split_checkpoint

ROOT = Path(__file__).parents[2]
CONFIG = dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4)
LAYOUTS = {
    "one rank": Layout(),
    "ep x dp": Layout(ep=4, dp=8),
    "uneven pp": Layout(pp=2, num_layers_per_stage=(2, 1)),
    "ep x pp x tp": Layout(ep=2, pp=3, tp=4),
}


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def manifest_of(directory: Path) -> dict:
    return json.loads((directory / "manifest.json").read_text())


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, so that FP8 can be joined and NaN compared."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def load_all(files: list[Path]) -> dict[str, torch.Tensor]:
    return {name: words(tensor) for file in files for name, tensor in load_file(file).items()}


def check_ranks(parts: Path, source: Path, layout: Layout) -> None:
    """The files that the manifest gives each rank hold the slices of the plan and nothing else."""
    checkpoint, weights = read_checkpoint(source), load_all(sorted(source.glob("*.safetensors")))
    made = plan(checkpoint.config(), checkpoint.tensors, layout)
    ranks = manifest_of(parts)["ranks"]
    assert len(ranks) == layout.world_size
    for rank, names in enumerate(ranks):
        held = load_all([parts / name for name in names])
        for piece in made.pieces(rank):
            expected = weights[piece.name]
            for dim, spans in enumerate(piece.spans):
                expected = torch.cat([expected.narrow(dim, a, b - a) for a, b in spans], dim)
            assert torch.equal(held.pop(piece.name), expected), (rank, piece.name)
        assert not held


def split_and_join(source: Path, layout: Layout, folder: Path) -> Path:
    """The directory of the parts, after they were found right and joined to what they were made of."""
    parts, joined = folder / "parts", folder / "joined"
    split_checkpoint(source, parts, layout, show_progress=False)
    check_ranks(parts, source, layout)
    join_checkpoint(parts, joined, show_progress=False)
    before, after = files_of(source), files_of(joined)
    assert sorted(after) == sorted(before)
    assert [name for name in before if after[name] != before[name]] == []
    return parts


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Complete model directories: shards of per-expert tensors (Mixtral's in one file), tokenizer, model card."""
    made = {}
    for family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        made[family], _ = make_model_dir(tmp_path_factory.mktemp(family), family, **CONFIG)
        (made[family] / "README.md").write_text("# A model\n")
        if family != "mixtral":
            (made[family] / "model.safetensors").unlink()
            tiny_model(family, vocab_size=300, **CONFIG).save_pretrained(made[family], max_shard_size="30KB")
    return made


@pytest.fixture
def parts(models, tmp_path) -> Path:
    split_checkpoint(models["qwen3_moe"], tmp_path / "parts", LAYOUTS["ep x dp"], show_progress=False)
    return tmp_path / "parts"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_joined_parts_are_the_checkpoint(models, family, layout, tmp_path):
    parts = split_and_join(models[family], layout, tmp_path)
    held = sum(tensor.nbytes for tensors in map(load_file, parts.glob("*.safetensors")) for tensor in tensors.values())
    assert held == read_checkpoint(models[family]).nbytes  # ranks that hold the same share a file


@pytest.mark.parametrize("elements", [1, 50])
def test_small_strips_make_the_same_files(models, elements, tmp_path, monkeypatch):
    layout = Layout(ep=2, tp=2)
    split_checkpoint(models["deepseek_v3"], tmp_path / "whole", layout, show_progress=False)
    monkeypatch.setattr(stream, "STRIP_ELEMENTS", elements)
    parts = split_and_join(models["deepseek_v3"], layout, tmp_path)
    assert files_of(parts) == files_of(tmp_path / "whole")


def test_stacked_experts(models, tmp_path):
    source = tmp_path / "stacked"
    shutil.copytree(models["qwen3_moe"], source, ignore=shutil.ignore_patterns("model*"))
    weights = tiny_model("qwen3_moe", vocab_size=300, **CONFIG).bfloat16().state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in weights
    save_file(weights, source / "model.safetensors")
    split_and_join(source, Layout(ep=2, pp=2, tp=4, num_layers_per_stage=(1, 2)), tmp_path)


@pytest.mark.parametrize("layout", [Layout(ep=4, pp=2), Layout(ep=2, tp=2)], ids=["ep x pp", "ep x tp"])
def test_fp8_with_scales_and_a_multi_token_layer(layout, tmp_path):
    between_blocks = dict(intermediate_size=512, moe_intermediate_size=256)
    make_fp8_dir(tmp_path / "fp8", mtp=True, **(dict() if layout.tp == 1 else between_blocks))
    split_and_join(tmp_path / "fp8", layout, tmp_path)


def test_a_tied_embedding_is_in_one_part_of_two_stages(tmp_path):
    source, _ = make_model_dir(tmp_path, "mixtral", tie_word_embeddings=True, **CONFIG)
    parts = split_and_join(source, Layout(pp=3), tmp_path)
    assert [set(names) for names in manifest_of(parts)["ranks"]] == [
        {"stage-000.safetensors", "stage-000+002.safetensors", "stage-000-ep-000.safetensors"},
        {"stage-001.safetensors", "stage-001-ep-000.safetensors"},
        {"stage-000+002.safetensors", "stage-002.safetensors", "stage-002-ep-000.safetensors"},
    ]
    assert list(load_file(parts / "stage-000+002.safetensors")) == ["model.embed_tokens.weight"]


def test_a_header_of_another_writer_and_odd_tensors_come_back(models, tmp_path):
    """Blanks, an order of names that is not the order of bytes, metadata, a scalar, an empty tensor, other dtypes."""
    source = tmp_path / "odd"
    shutil.copytree(models["mixtral"], source, ignore=shutil.ignore_patterns("model*"))
    layer = "model.layers.1."
    header = {
        f"{layer}c": {"dtype": "BOOL", "shape": [3], "data_offsets": [52, 55]},
        "__metadata__": {"quelle": "größer"},
        f"{layer}a": {"dtype": "I64", "shape": [2, 3], "data_offsets": [0, 48]},
        f"{layer}b": {"dtype": "F32", "shape": [], "data_offsets": [48, 52]},
        f"{layer}d": {"dtype": "F16", "shape": [0, 4], "data_offsets": [55, 55]},
    }
    text = json.dumps(header, indent=2, ensure_ascii=False).encode() + b" " * 5
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(55)))
    split_and_join(source, Layout(pp=2), tmp_path)


KILL_AFTER_3_FILES = """
import os, signal, sys
from coati_ext.checkpoint_io.resumable import ResumableDirectory
from applications.split_checkpoint import main
record, count = ResumableDirectory.record, []
def record_and_kill(self, name, checksum):
    record(self, name, checksum)
    count.append(name)
    if len(count) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
ResumableDirectory.record = record_and_kill
main(sys.argv[1:])
"""


def test_a_killed_split_is_continued(models, tmp_path, capsys):
    layout = tmp_path / "layout.yaml"
    layout.write_text("ep: 4\npp: 2\n")
    arguments = ["--pretrained", str(models["deepseek_v3"]), "--layout", str(layout), "--output"]
    script = [sys.executable, "-c", KILL_AFTER_3_FILES, *arguments, str(tmp_path / "parts"), "--workers", "1"]
    assert subprocess.run(script, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    assert not (tmp_path / "parts").exists()
    finished = {file.name: file.stat().st_ino for file in (tmp_path / "parts.incomplete").glob("*.safetensors")}
    assert len(finished) == 3
    assert command.main([*arguments, str(tmp_path / "parts")]) == 0
    assert "3 of 6 files were finished" in capsys.readouterr().out
    assert all((tmp_path / "parts" / name).stat().st_ino == inode for name, inode in finished.items())
    assert command.main([*arguments, str(tmp_path / "at once")]) == 0
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "at once")


def test_a_split_killed_over_its_checksums_is_continued(models, parts, tmp_path, monkeypatch):
    module = sys.modules["coati_ext.checkpoint_io.split"]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "_sha256", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        split_checkpoint(models["qwen3_moe"], tmp_path / "again", LAYOUTS["ep x dp"], show_progress=False)
    split_checkpoint(models["qwen3_moe"], tmp_path / "again", LAYOUTS["ep x dp"], show_progress=False)
    assert files_of(tmp_path / "again") == files_of(parts)


def test_an_interrupted_join_is_continued(models, parts, tmp_path, monkeypatch, capsys):
    record, done = ResumableDirectory.record, []

    def record_two(self: ResumableDirectory, name: str, checksum: str) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(name)
        record(self, name, checksum)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ResumableDirectory, "record", record_two)
        join_checkpoint(parts, tmp_path / "joined", num_workers=1, show_progress=False)
    assert not (tmp_path / "joined").exists()
    join_checkpoint(parts, tmp_path / "joined", show_progress=False)
    assert "2 of " in capsys.readouterr().out
    assert files_of(tmp_path / "joined") == files_of(models["qwen3_moe"])


PART, CARD, HEADER = "stage-000-ep-002.safetensors", "README.md", "source/model-00002-of-00013.safetensors.header"


@pytest.mark.parametrize("name", [PART, CARD, HEADER])
def test_a_flipped_bit_is_found_and_nothing_is_written(parts, name, tmp_path):
    (header,) = parts.glob("source/model-00002-of-*.header")
    damaged = header if name == HEADER else parts / name
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{damaged.name} are not those written .*sha256"):
        join_checkpoint(parts, tmp_path / "joined", show_progress=False)
    assert not (tmp_path / "joined").exists()
    assert not (tmp_path / "joined.incomplete").exists()


def test_a_missing_part_is_named(parts, tmp_path):
    (parts / PART).unlink()
    with pytest.raises(FileNotFoundError, match=f"1 files of manifest.json are missing: {PART}"):
        join_checkpoint(parts, tmp_path / "joined", show_progress=False)


def test_a_part_cut_short_is_named(parts, tmp_path):
    (parts / PART).write_bytes((parts / PART).read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{PART} has \d+ bytes, not the \d+ written"):
        join_checkpoint(parts, tmp_path / "joined", show_progress=False)


def test_a_manifest_that_forgot_a_slice_is_refused(parts, tmp_path):
    manifest = manifest_of(parts)
    del manifest["parts"][PART]
    (parts / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"is not what was written \(its sha256 differs\)"):
        join_checkpoint(parts, tmp_path / "joined", show_progress=False)


@pytest.mark.parametrize("content, message", [(None, "has no manifest.json"), ("{}", "format is None")])
def test_a_directory_of_another_kind_is_refused(content, message, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    if content is not None:
        (folder / "manifest.json").write_text(content)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        join_checkpoint(folder, tmp_path / "joined")


def test_files_that_are_not_copied_are_named(models, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(models["mixtral"], source)
    (source / "consolidated.pth").write_bytes(b"x")
    report = split_checkpoint(source, tmp_path / "parts", Layout(ep=2), show_progress=False)
    assert report.left_out == ["consolidated.pth"]
    assert "not copied: consolidated.pth" in report.format()
    assert report.num_ranks == 2


def test_the_output_may_not_be_inside_the_input(models):
    for output in (models["mixtral"], models["mixtral"] / "parts"):
        with pytest.raises(ValueError, match="is inside the input"):
            split_checkpoint(models["mixtral"], output, Layout())


def test_a_layout_file(tmp_path):
    file = tmp_path / "layout.yaml"
    file.write_text("ep: 2\npp: 2\ndp: 4\nnum_layers_per_stage: [3, 1]\n")
    assert read_layout(file) == Layout(ep=2, pp=2, dp=4, num_layers_per_stage=(3, 1))


@pytest.mark.parametrize(
    "text, message",
    [
        ("ep: 2\nnum_layer_per_stage: [1]", "unknown key 'num_layer_per_stage'; did you mean 'num_layers_per_stage'?"),
        ("sp: 2", "unknown key 'sp'"),
        ("- 1", "expected a mapping with the keys ep, pp, tp, dp, num_layers_per_stage, found list"),
        ("ep: [", "while parsing"),
        ("ep: two", "ep must be a positive integer, got 'two'"),
    ],
)
def test_a_wrong_layout_file_is_refused(text, message, tmp_path):
    (tmp_path / "layout.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        read_layout(tmp_path / "layout.yaml")
    assert str(error.value).startswith(f"{tmp_path / 'layout.yaml'}: ")
    assert message in str(error.value)


def test_the_command_says_what_is_wrong_in_one_line(models, tmp_path, capsys):
    (tmp_path / "layout.yaml").write_text("ep: 16")
    arguments = ["--pretrained", str(models["mixtral"]), "--output", str(tmp_path / "parts"), "--layout"]
    assert command.main([*arguments, str(tmp_path / "layout.yaml")]) == 1
    assert capsys.readouterr().err == "split_checkpoint: error: ep=16 does not divide the 4 experts of 'mixtral'\n"
    assert command.main([*arguments, str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(
    "arguments", [["--pretrained", "x"], ["--join", "x", "--layout", "y"], ["--join", "x", "--workers", "0"], []]
)
def test_flags_that_do_not_fit_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([*arguments, "--output", "z"])
    assert stopped.value.code == 2
    assert ": error: " in capsys.readouterr().err
