"""What is saved comes back, in the same layout and in others."""

import json
import math
import random

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from safetensors import safe_open

from coati_ext.checkpoint_io import state_file
from coati_ext.checkpoint_io.safetensors_file import read_header
from coati_ext.checkpoint_io.training_state import (
    Piece,
    agree_on_training_state,
    find_training_state,
    save_training_state,
)

# name -> (shape, dimension that EP or TP cuts, None for a tensor that both ranks have)
TENSORS = {"experts.lora_A": ((4, 3, 5), 0), "columns": ((5, 7), 1), "norm": ((7,), None)}
KINDS = {"master": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}


def cut(size: int, parts: int, part: int) -> tuple[int, int]:
    """The last parts may be shorter, or empty."""
    step = math.ceil(size / parts)
    return min(part * step, size), min((part + 1) * step, size)


def pieces_of(rank: int, ep: int, dp: int) -> list[Piece]:
    pieces = []
    for name, (shape, dim) in TENSORS.items():
        start, stop = (0, shape[0]) if dim is None else cut(shape[dim], ep, rank % ep)
        local = math.prod(shape) // shape[dim or 0] * (stop - start)
        flat_start, flat_stop = cut(local, dp, rank // ep)
        for kind in KINDS:
            where = {"dim": dim or 0, "start": start, "stop": stop, "flat_start": flat_start, "flat_stop": flat_stop}
            pieces.append(Piece(name=name, kind=kind, shape=shape, **where))
    return pieces


def array(piece: Piece) -> torch.Tensor:
    """The piece of random full tensors that are the same everywhere."""
    generator = torch.Generator().manual_seed(sum(map(ord, piece.name + piece.kind)))
    full = torch.randn(piece.shape, generator=generator).to(KINDS[piece.kind])
    return full.narrow(piece.dim, piece.start, piece.stop - piece.start).reshape(-1)[piece.flat_start : piece.flat_stop]


def save(root, step: int, *, rank: int = 0, ep: int = 1, dp: int = 1, group=None, keep_last: int = 9, state=None):
    """This rank's part of the tensors above."""
    pieces = {piece: array(piece) for piece in pieces_of(rank, ep, dp)}
    rank_state = {"rng": torch.arange(5, dtype=torch.uint8) + rank} if state is None else state
    shared = {"step": step, "from rank": rank}
    return save_training_state(
        root, step, pieces=pieces, rank_state=rank_state, shared_state=shared, keep_last=keep_last, group=group
    )


def save_as_rank(root: str, step: int, ep: int, dp: int) -> str:
    return str(save(root, step, rank=dist.get_rank(), ep=ep, dp=dp, group=dist.group.WORLD))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """A checkpoint of ep 2 x dp 2."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    assert pool(4).run(save_as_rank, str(root), 120, 2, 2) == [str(root / "step-00000120")] * 4
    return find_training_state(root)


def test_the_files_of_a_checkpoint(four_ranks):
    ranks = [f"rank-{rank:05d}.safetensors" for rank in range(4)]
    assert sorted(path.name for path in four_ranks.directory.iterdir()) == ["manifest.json", *ranks, "state.json"]
    assert (four_ranks.step, four_ranks.num_ranks) == (120, 4)
    assert four_ranks.shared_state == {"step": 120, "from rank": 0}
    assert json.loads((four_ranks.directory / "state.json").read_text()) == four_ranks.shared_state


def test_the_files_are_safetensors(four_ranks):
    with safe_open(four_ranks.directory / "rank-00001.safetensors", framework="pt") as opened:
        described = json.loads(opened.metadata()["pieces"])
        assert [Piece(**fields) for fields in described.values()] == pieces_of(1, 2, 2)
        for key, fields in described.items():
            assert torch.equal(opened.get_tensor(key), array(Piece(**fields)))
    entries, _ = read_header(four_ranks.directory / "rank-00001.safetensors")
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries)  # for readers that map the file


@pytest.mark.parametrize("ep, dp", [(2, 2), (4, 1), (1, 4), (1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (3, 2)])
def test_every_layout_reads_its_own_tensors(four_ranks, ep, dp):
    for rank in range(ep * dp):
        wanted = pieces_of(rank, ep, dp)
        found = list(four_ranks.read(wanted, rank=rank))
        assert [piece for piece, _ in found] == wanted
        for piece, tensor in found:
            expected = array(piece)
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)


def test_the_same_layout_opens_one_file_and_reads_its_pieces_alone(four_ranks, monkeypatch):
    read = []

    def counted(descriptor, buffer, offset, file):
        read.append((file.name, len(buffer)))
        return read_exactly(descriptor, buffer, offset, file)

    read_exactly = state_file.read_exactly
    monkeypatch.setattr(state_file, "read_exactly", counted)
    state = find_training_state(four_ranks.directory)
    tensors = [tensor for _, tensor in state.read(pieces_of(3, 2, 2), rank=3)]
    assert {name for name, _ in read} == {"rank-00003.safetensors"}
    assert list(state._indices) == ["rank-00003.safetensors"]
    assert sum(size for _, size in read) == sum(tensor.nbytes for tensor in tensors)
    read.clear()
    tensors = [tensor for _, tensor in state.read(pieces_of(0, 3, 1))]
    assert sum(size for _, size in read) == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    "wanted, message",
    [
        (Piece.whole("norm", "step", (7,)), r"step-00000120 has no step of norm \(7,\)"),
        (Piece.whole("norm", "master", (8,)), r"step-00000120: master of norm \(8,\) is wanted.* shape \(7,\)"),
        (
            Piece(name="q", kind="m", shape=(9,), dim=0, start=0, stop=9, flat_start=0, flat_stop=0),
            r"step-00000120 has no m of q",
        ),
    ],
)
def test_what_was_not_saved_is_refused_before_anything_is_read(four_ranks, wanted, message):
    with pytest.raises(ValueError, match=message):
        four_ranks.read([*pieces_of(0, 1, 1), wanted])


def test_a_part_that_no_rank_saved_is_refused(tmp_path):
    half = Piece(name="w", kind="master", shape=(4, 2), dim=0, start=0, stop=2, flat_start=0, flat_stop=4)
    state = {"rank_state": {}, "shared_state": {}, "keep_last": 1, "group": None}
    save_training_state(tmp_path, 1, pieces={half: torch.zeros(4)}, **state)
    with pytest.raises(ValueError, match=rf"{tmp_path}/step-00000001: master of w \(4, 2\): elements 4:8 of the slice"):
        find_training_state(tmp_path).read([Piece.whole("w", "master", (4, 2))])


def test_parts_of_different_dtypes_are_refused(tmp_path):
    rows = {"name": "w", "kind": "master", "shape": (2, 2), "dim": 0, "flat_start": 0, "flat_stop": 2}
    pieces = {Piece(start=0, stop=1, **rows): torch.zeros(2), Piece(start=1, stop=2, **rows): torch.zeros(2).half()}
    save_training_state(tmp_path, 1, pieces=pieces, rank_state={}, shared_state={}, keep_last=1, group=None)
    with pytest.raises(ValueError, match=r"master of w .* different dtypes"):
        find_training_state(tmp_path).read([Piece.whole("w", "master", (2, 2))])


def test_two_slices_of_a_tensor_on_one_rank_come_back_by_rank(tmp_path):
    rows = {"name": "gate_up", "kind": "master", "shape": (4,), "dim": 0, "flat_start": 0, "flat_stop": 1}
    pieces = {Piece(start=i, stop=i + 1, **rows): torch.tensor([float(i)]) for i in (0, 2)}
    save_training_state(tmp_path, 1, pieces=pieces, rank_state={}, shared_state={}, keep_last=1, group=None)
    found = dict(find_training_state(tmp_path).read(pieces, rank=0))
    assert {piece.start: tensor.item() for piece, tensor in found.items()} == {0: 0.0, 2: 2.0}


# --- states


def test_each_rank_has_its_state_back_if_the_ranks_are_as_many(four_ranks):
    for rank in range(4):
        assert torch.equal(four_ranks.rank_state(rank, num_ranks=4)["rng"], torch.arange(5, dtype=torch.uint8) + rank)
    assert four_ranks.rank_state(0, num_ranks=3) is None
    assert four_ranks.rank_state(0) is None  # this process is one


def test_a_nested_rank_state_comes_back_equal(tmp_path):
    version, internal, gauss = random.getstate()
    state = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
        "loss": [
            1.5,
            float("inf"),
            {"é": True, "scalar": torch.tensor(3, dtype=torch.int64), "none": torch.empty(0, 2)},
        ],
    }
    save(tmp_path, 1, state=state)
    found = find_training_state(tmp_path).rank_state(0)
    assert torch.equal(found["torch"], state["torch"])
    nested = found["loss"].pop()
    assert nested["scalar"].item() == 3 and nested["scalar"].shape == () and nested["none"].shape == (0, 2)
    assert nested["é"] is True
    assert (found["python"], found["loss"]) == (state["python"], [1.5, float("inf")])


@pytest.mark.parametrize(
    "state, message",
    [
        ({"rng": (3, 4)}, r"rank_state.rng is tuple \(\(3, 4\)\), which a checkpoint cannot hold"),
        ({"a": [0, {1: 2}]}, r"rank_state.a\[1\] is dict"),
        ({"a": {"__tensor__": "b"}}, "rank_state.a is dict"),
        ({"a": {3}}, "rank_state.a is set"),
    ],
)
def test_a_state_that_json_would_change_is_refused(tmp_path, state, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, 1, state=state)
    assert find_training_state(tmp_path) is None


def test_a_tensor_that_is_not_its_piece_and_one_in_the_shared_state_are_refused(tmp_path):
    piece = Piece.whole("w", "master", (2, 2))
    states = {"rank_state": {}, "keep_last": 1, "group": None}
    with pytest.raises(ValueError, match=r"master of w \(2, 2\): its piece is of shape \(4,\), the tensor \(2, 2\)"):
        save_training_state(tmp_path, 1, pieces={piece: torch.zeros(2, 2)}, shared_state={}, **states)
    with pytest.raises(ValueError, match=r"shared_state.lr is Tensor"):
        save_training_state(tmp_path, 1, pieces={}, shared_state={"lr": torch.ones(())}, **states)


# --- which checkpoints there are


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_only_the_newest_are_kept(tmp_path):
    root = tmp_path / "a" / "checkpoints"
    for step in (10, 20, 30):
        assert save(root, step, keep_last=2) == root / f"step-{step:08d}"
    assert names(root) == ["step-00000020", "step-00000030"]
    save(root, 40, keep_last=1)
    assert names(root) == ["step-00000040"]
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        save(root, 50, keep_last=0)


def test_what_was_saved_last_is_the_newest_if_training_went_back(tmp_path):
    for step in (10, 20, 30, 20):
        save(tmp_path, step, keep_last=2)
    assert find_training_state(tmp_path).step == 20
    assert names(tmp_path) == ["step-00000020", "step-00000030"]
    save(tmp_path, 25, keep_last=2)
    assert names(tmp_path) == ["step-00000020", "step-00000025"]


def test_other_files_are_left_alone(tmp_path):
    for name in ("step-00000001.bak", "step-7", ".step-00000002.incomplete.txt", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes").write_text("")
    before = names(tmp_path)
    for step in (1, 2):
        save(tmp_path, step, keep_last=1)
    assert names(tmp_path) == sorted([*before, "step-00000002"])


def test_nothing_there_is_a_fresh_start(tmp_path):
    assert find_training_state(tmp_path) is None
    assert find_training_state(tmp_path / "none") is None
    (tmp_path / ".step-00000010.incomplete").mkdir()
    assert agree_on_training_state(tmp_path, None) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; checkpoints are in a directory"):
        find_training_state(tmp_path / "file")


def test_one_can_be_named(tmp_path):
    root = tmp_path / "checkpoints"
    first = save(root, 10)
    save(root, 20)
    for state in (find_training_state(root, which=first), find_training_state(first)):
        assert (state.step, state.messages) == (10, ())
    assert agree_on_training_state(root, None, which=first).step == 10
    with pytest.raises(ValueError, match=r"step-00000030: no such directory.* has step-00000020, step-00000010"):
        find_training_state(root, which=root / "step-00000030")
    with pytest.raises(ValueError, match=r"checkpoints is no checkpoint; it has step-00000020, step-00000010 in it"):
        find_training_state(tmp_path, which=root)
