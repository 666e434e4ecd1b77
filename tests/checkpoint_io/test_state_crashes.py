"""Kills at any moment, damaged files and failing disks: there is always a checkpoint to go on from."""

import errno
import multiprocessing
import os
import random
import re
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import pool

from coati_ext.checkpoint_io import state_file
from coati_ext.checkpoint_io.training_state import (
    Piece,
    TrainingState,
    agree_on_training_state,
    find_training_state,
    save_training_state,
)

PIECE = Piece.whole("w", "master", (3, 50_000))


def save(root, step: int, value: float, *, keep_last: int = 9, group: dist.ProcessGroup | None = None) -> Path:
    return save_training_state(
        root,
        step,
        pieces={PIECE: torch.full((PIECE.numel,), value)},
        rank_state={},
        shared_state={"value": value},
        keep_last=keep_last,
        group=group,
    )


def value_of(state: TrainingState) -> float:
    """What was saved, if all of it is from the same save."""
    tensor = dict(state.read([PIECE]))[PIECE]
    assert bool((tensor == state.shared_state["value"]).all())
    return state.shared_state["value"]


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# --- kills


def _save_forever(root: str, step: int, saved) -> None:
    """Each step twice, so that a kill may come while a checkpoint is replaced."""
    while True:
        for value in (step, step + 0.5):
            save(root, step, value, keep_last=2)
            saved.value = value
        step += 1


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["coati_ext.checkpoint_io.training_state"])
    saved = context.Value("d", 0.0, lock=False)
    rng = random.Random(0)
    interrupted = 0
    for _ in range(20):
        before = saved.value
        process = context.Process(target=_save_forever, args=(str(tmp_path), int(before) + 1, saved))
        process.start()
        while saved.value == before:  # until it is at work
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        interrupted += any(name.startswith(".") for name in names(tmp_path))
        state = find_training_state(tmp_path)
        assert state.messages == ()
        assert value_of(state) >= saved.value
    assert interrupted > 0  # else the moments were all between two saves, and the test shows nothing


class Killed(BaseException):
    """Not an Exception: nothing is cleared up on its way."""


def test_a_crash_before_any_change_of_the_directory_loses_nothing(tmp_path, monkeypatch):
    """At each call in turn that changes the file system, while a checkpoint is replaced and an older one deleted."""
    calls = ("mkdir", "rename", "unlink", "rmdir", "fsync")
    real = {name: getattr(os, name) for name in calls}
    crash_at = 0
    finished = False
    while not finished:
        root = tmp_path / str(crash_at)
        save(root, 1, 1.0)
        save(root, 2, 2.0)
        count = 0

        def counted(name, *args, **kwargs):
            nonlocal count
            count += 1
            if count > crash_at:  # noqa: B023 (called in this pass of the loop only)
                raise Killed
            return real[name](*args, **kwargs)

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, partial(counted, name))
            try:
                save(root, 2, 3.0, keep_last=1)
                finished = True
            except Killed:
                pass
        state = find_training_state(root)
        assert (state.step, state.messages) == (2, ())
        assert value_of(state) in ((3.0,) if finished else (2.0, 3.0))
        for directory in root.glob("step-*"):
            value_of(find_training_state(directory))  # no other is half deleted under the name of a complete one
        save(root, 3, 4.0, keep_last=1)
        assert names(root) == ["step-00000003"]
        assert value_of(find_training_state(root)) == 4.0
        crash_at += 1
    assert crash_at > 10  # such a save has more calls than that


def test_one_that_was_being_replaced_survives_a_next_save_that_fails(tmp_path, monkeypatch):
    save(tmp_path, 2, 2.0).rename(tmp_path / ".step-00000002.replaced")  # as a kill between the two renames leaves it
    assert value_of(find_training_state(tmp_path)) == 2.0
    monkeypatch.setattr("coati_ext.checkpoint_io.training_state.write_rank_file", _full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, 3.0)
    assert names(tmp_path) == ["step-00000002"]
    assert value_of(find_training_state(tmp_path)) == 2.0


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- damage


def _edit(file: Path, change) -> None:
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)


def _flip(at: int):
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


RANK_FILE = "rank-00000.safetensors"
DAMAGES = {
    "cut short": (lambda d: os.truncate(d / RANK_FILE, 1000), r"rank-00000.safetensors: 1000 bytes instead of \d+"),
    "byte of data": (lambda d: _edit(d / RANK_FILE, _flip(-1000)), "rank-00000.safetensors: sha256 differs"),
    "byte of header": (lambda d: _edit(d / RANK_FILE, _flip(20)), "rank-00000.safetensors: sha256 differs"),
    "file deleted": (lambda d: (d / RANK_FILE).unlink(), "rank-00000.safetensors: missing"),
    "state deleted": (lambda d: (d / "state.json").unlink(), "state.json: missing"),
    "byte of state": (lambda d: _edit(d / "state.json", _flip(-5)), "state.json: sha256 differs"),
    "manifest deleted": (lambda d: (d / "manifest.json").unlink(), "manifest.json: missing"),
    "empty": (lambda d: (shutil.rmtree(d), d.mkdir()), "manifest.json: missing"),
    "no JSON": (lambda d: (d / "manifest.json").write_bytes(b"\xff\x00"), "manifest.json: damaged"),
    "deep": (lambda d: (d / "manifest.json").write_bytes(b"[" * 100_000), "manifest.json: damaged"),
    "list": (lambda d: (d / "manifest.json").write_text("[1]"), "manifest.json: damaged"),
    "no manifest": (lambda d: (d / "manifest.json").write_text("{}"), "manifest.json: damaged"),
    "digit": (
        lambda d: (d / "manifest.json").write_text((d / "manifest.json").read_text().replace('"step": 2', '"step": 3')),
        "manifest.json: damaged",
    ),
}


@pytest.mark.parametrize("damage, problem", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found_and_the_checkpoint_before_is_used(tmp_path, capsys, damage, problem):
    save(tmp_path, 1, 1.0)
    directory = save(tmp_path, 2, 2.0)
    damage(directory)
    message = rf"checkpoint step-00000002 is damaged \({problem}\): going on from step-00000001"
    for find in (find_training_state, lambda root, **which: agree_on_training_state(root, None, **which)):
        state = find(tmp_path)
        assert value_of(state) == 1.0
        assert len(state.messages) == 1
        with pytest.raises(ValueError, match=rf"step-00000002 is damaged \({problem}\)"):
            find(tmp_path, which=directory)
        assert re.fullmatch(message, state.messages[0])
    assert capsys.readouterr().out == state.messages[0] + "\n"  # by agree_on_training_state, once
    save(tmp_path, 2, 5.0)  # training gets there again
    assert value_of(find_training_state(tmp_path)) == 5.0


def test_all_damaged_is_an_error_that_names_them(tmp_path):
    for directory in [save(tmp_path, step, 1.0) for step in (1, 2)]:
        (directory / RANK_FILE).unlink()
    expected = r"no checkpoint can be used: step-00000002 is damaged \(rank.* step-00000001 is damaged \(rank.*missing"
    with pytest.raises(ValueError, match=expected):
        find_training_state(tmp_path)


def test_one_that_lost_a_file_is_not_counted_among_those_kept(tmp_path):
    save(tmp_path, 1, 1.0)
    (save(tmp_path, 2, 2.0) / RANK_FILE).unlink()
    save(tmp_path, 3, 3.0, keep_last=2)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_only_the_named_files_are_hashed(tmp_path):
    directory = save(tmp_path, 1, 1.0)
    _edit(directory / RANK_FILE, _flip(-1000))
    assert find_training_state(tmp_path, files=["rank-00001.safetensors"]).step == 1
    with pytest.raises(ValueError, match="sha256 differs"):
        find_training_state(tmp_path, files=[RANK_FILE])


# --- several ranks


def _save_as_rank(root: str, step: int, value: float) -> None:
    save(root, step, value, group=dist.group.WORLD)


def _agree(root: str) -> tuple[float, tuple[str, ...]]:
    state = agree_on_training_state(root, dist.group.WORLD)
    return value_of(state), state.messages


@pytest.mark.parametrize("damaged_rank", [0, 1])
def test_ranks_agree_though_one_alone_sees_the_damage(tmp_path, damaged_rank):
    for step in (1, 2):
        pool(2).run(_save_as_rank, str(tmp_path), step, float(step))
    file = f"rank-{damaged_rank:05d}.safetensors"
    _edit(tmp_path / "step-00000002" / file, _flip(-1000))
    message = f"checkpoint step-00000002 is damaged ({file}: sha256 differs): going on from step-00000001"
    assert pool(2).run(_agree, str(tmp_path)) == [(1.0, (message,))] * 2


def _errors_of(root: str, failing_rank: int) -> str:
    """What a save raises on this rank while the disk of one is full."""

    real = os.fsync
    try:
        if dist.get_rank() == failing_rank:
            state_file.os.fsync = _full
        save(root, 2, 2.0, group=dist.group.WORLD)
    except OSError as error:
        return str(error)
    finally:
        state_file.os.fsync = real
    return "no error"


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_leaves_the_others(tmp_path, failing_rank):
    pool(2).run(_save_as_rank, str(tmp_path), 1, 1.0)
    errors = pool(2).run(_errors_of, str(tmp_path), failing_rank)
    assert all("No space left on device" in error for error in errors)
    assert errors[1 - failing_rank].startswith(f"rank {failing_rank}: ")
    assert names(tmp_path) == ["step-00000001"]
    assert value_of(find_training_state(tmp_path)) == 1.0
    assert pool(2).run(_errors_of, str(tmp_path), 2) == ["no error"] * 2  # nobody was left waiting


def test_a_file_in_the_way_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    for error in pool(2).run(_errors_of, str(tmp_path / "file" / "checkpoints"), 2):
        assert "Not a directory" in error
    (tmp_path / "step-00000002").write_text("")
    for error in pool(2).run(_errors_of, str(tmp_path), 2):
        assert "step-00000002 is a file, in the way of a checkpoint" in error


def _wrong_state(root: str) -> str:
    tensor = torch.zeros(PIECE.numel + dist.get_rank())  # wrong on rank 1 alone
    states = {"rank_state": {}, "shared_state": {}, "keep_last": 1, "group": dist.group.WORLD}
    try:
        save_training_state(root, 1, pieces={PIECE: tensor}, **states)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_wrong_tensor_on_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path):
    errors = pool(2).run(_wrong_state, str(tmp_path))
    assert errors[0] == f"rank 1: {errors[1]}" and "its piece is of shape" in errors[1]
    assert names(tmp_path) == []


def _save_on_own_disk(root: str) -> str:
    try:
        _save_as_rank(f"{root}/{dist.get_rank()}", 1, 1.0)
    except OSError as error:
        return str(error)
    return "no error"


def test_hosts_that_share_no_file_system_are_told_so(tmp_path):
    for error in pool(2).run(_save_on_own_disk, str(tmp_path)):
        assert "do all hosts share the file system" in error
