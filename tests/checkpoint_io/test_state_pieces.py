"""The arithmetic of pieces against the indices of every element, for random layouts."""

import itertools
import random

import pytest
import torch

from coati_ext.checkpoint_io.state_pieces import Piece, overlap, plan_copies, runs


def indices(piece: Piece) -> torch.Tensor:
    """Of the piece's elements in the whole tensor, by cutting the tensor of all indices."""
    whole = torch.arange(torch.Size(piece.shape).numel()).reshape(piece.shape)
    local = whole.narrow(piece.dim, piece.start, piece.stop - piece.start)
    return local.reshape(-1)[piece.flat_start : piece.flat_stop]


def cuts(rng: random.Random, size: int, parts: int) -> list[tuple[int, int]]:
    """An uneven division of `size`; parts may be empty."""
    edges = [0, *sorted(rng.randint(0, size) for _ in range(parts - 1)), size]
    return list(itertools.pairwise(edges))


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))


def random_layout(rng: random.Random, shape: tuple[int, ...]) -> list[Piece]:
    """Pieces that cover a tensor: slices along some dimension, each of them flattened and divided again."""
    dim = rng.randrange(len(shape))
    pieces = []
    for start, stop in cuts(rng, shape[dim], rng.randint(1, 4)):
        numel = torch.Size(shape).numel() // shape[dim] * (stop - start)
        for flat_start, flat_stop in cuts(rng, numel, rng.randint(1, 4)):
            flat = {"flat_start": flat_start, "flat_stop": flat_stop}
            pieces.append(Piece(name="w", kind="master", shape=shape, dim=dim, start=start, stop=stop, **flat))
    return pieces


def test_runs_are_the_indices_of_the_elements():
    for seed in range(100):
        rng = random.Random(seed)
        for piece in random_layout(rng, random_shape(rng)):
            found = torch.full((piece.numel,), -1)
            for run in runs(piece):
                assert run.length > 0
                found[run.offset : run.offset + run.length] = torch.arange(run.index, run.index + run.length)
            assert torch.equal(found, indices(piece))


def test_overlap_is_what_two_pieces_share():
    for seed in range(100):
        rng = random.Random(seed)
        shape = random_shape(rng)
        for source in random_layout(rng, shape):
            for wanted in random_layout(rng, shape):
                ours, theirs = indices(source), indices(wanted)
                shared = []
                for copy in overlap(source, wanted):
                    taken = ours[copy.source : copy.source + copy.length]
                    assert torch.equal(taken, theirs[copy.destination : copy.destination + copy.length])
                    shared += taken.tolist()
                assert sorted(shared) == sorted(set(ours.tolist()) & set(theirs.tolist()))


def test_any_layout_is_made_from_any_other():
    for seed in range(300):
        rng = random.Random(seed)
        shape = random_shape(rng)
        saved = [piece for _ in range(rng.randint(1, 2)) for piece in random_layout(rng, shape)]  # twice: replicas that
        rng.shuffle(saved)  # are cut in different ways
        for wanted in random_layout(rng, shape):
            made, times = torch.full((wanted.numel,), -1), torch.zeros(wanted.numel)
            for i, copies in plan_copies(wanted, saved).items():
                for copy in copies:
                    part = slice(copy.destination, copy.destination + copy.length)
                    made[part] = indices(saved[i])[copy.source : copy.source + copy.length]
                    times[part] += 1
            assert torch.equal(made, indices(wanted))
            assert bool((times == 1).all())


def test_a_part_that_no_piece_has_is_refused():
    for seed in range(100):
        rng = random.Random(seed)
        saved = random_layout(rng, random_shape(rng))
        lost = rng.choice([i for i, piece in enumerate(saved) if piece.numel])
        missing = set(indices(saved[lost]).tolist())
        remaining = saved[:lost] + saved[lost + 1 :]
        for wanted in random_layout(rng, saved[0].shape):
            if missing & set(indices(wanted).tolist()):
                with pytest.raises(ValueError, match="were saved by no rank"):
                    plan_copies(wanted, remaining)
            else:
                plan_copies(wanted, remaining)


def test_the_missing_elements_are_named():
    whole = Piece.whole("w", "exp_avg", (3, 4))
    saved = [
        Piece(name="w", kind="exp_avg", shape=(3, 4), dim=0, start=0, stop=1, flat_start=0, flat_stop=3),
        Piece(name="w", kind="exp_avg", shape=(3, 4), dim=0, start=2, stop=3, flat_start=0, flat_stop=4),
    ]
    with pytest.raises(ValueError, match=r"exp_avg of w \(3, 4\): elements 3:8 of the slice 0:3 along dim 0"):
        plan_copies(whole, saved)


def test_an_equal_piece_is_one_copy_however_it_is_cut():
    columns = Piece(name="w", kind="master", shape=(50, 8), dim=1, start=3, stop=5, flat_start=1, flat_stop=99)
    assert plan_copies(columns, [columns]) == {0: [(0, 0, 98)]}


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"master of w \(8, 2\) is wanted, but what was saved has the shape \(8, 4\)"):
        plan_copies(Piece.whole("w", "master", (8, 2)), [Piece.whole("w", "master", (8, 4))])


@pytest.mark.parametrize(
    "change", [{"dim": 2}, {"stop": 4}, {"start": 3}, {"flat_stop": 9}, {"flat_start": 5}, {"shape": ()}], ids=str
)
def test_a_piece_that_cannot_be_is_refused(change):
    fields = {"shape": (3, 4), "dim": 0, "start": 1, "stop": 3, "flat_start": 2, "flat_stop": 4}
    Piece(name="w", kind="master", **fields)
    with pytest.raises(ValueError, match="master of w"):
        Piece(name="w", kind="master", **(fields | change))
