"""Saves that fail or are killed: all ranks say why, and what was at the directory is still there."""

import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from distributed import pool
from peft import LoraConfig

from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import build_meta_model
from coati_ext.checkpoint_io.save_model import save_model
from coati_ext.models.lora import inject_lora
from tests.checkpoint_io.changed_models import ONE, check_loads_as, content, reference, save_one, save_part
from tests.checkpoint_io.meta_models import loaded
from tests.checkpoint_io.meta_models import save_model as save_base

FP32, FP16 = torch.float32, torch.float16
EP2, DP2 = Layout(ep=2), Layout(dp=2)


# --- what goes wrong on one rank


def _poison(model, kwargs):
    model.model.layers[1].mlp.experts.down_proj.data[1, 2, 3] = float("inf")


def _fail(model, kwargs):
    def fail(file, ranges):
        raise OSError(28, "No space left on device", str(file))

    return {"_pwrite": fail}


def _other_size(model, kwargs):
    kwargs["max_shard_size"] = 999


def _other_rank(model, kwargs):
    kwargs["rank"] = 0


FAILURES = {
    "not finite": (_poison, r"ValueError: .*layers.1.\S+experts.3.w2.weight is not finite in torch.float32"),
    "disk full": (_fail, r"OSError: .*No space left on device: .*model.safetensors"),
    "another plan": (_other_size, r"ValueError: save_model: ranks 0 and 1 would write different files"),
    "another rank": (_other_rank, r"ValueError: .*layers.0.\S+experts.0.w1.weight has shape"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_on_one_rank_is_met_by_all_and_leaves_what_was_there(failure, tmp_path):
    break_it, message = FAILURES[failure]
    base, output = save_base(tmp_path / "base", "mixtral"), tmp_path / "out"
    save_one(base, output)
    before = {file.name: file.read_bytes() for file in output.iterdir()}
    results = pool(2).run(save_part, str(base), str(output), EP2, {}, break_it)
    for _, error in results:
        assert re.search(message, error), error
    assert {file.name: file.read_bytes() for file in output.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_a_value_that_the_dtype_cannot_hold_is_named(tmp_path):
    base = save_base(tmp_path / "base", "llama")
    model, _ = loaded(base)
    model.model.norm.weight.data[3] = 1e5
    save_model(model, tmp_path / "fp32", **ONE, pretrained=base)
    with pytest.raises(ValueError, match=r"^model.norm.weight is not finite in torch.float16; nothing is saved"):
        save_model(model, tmp_path / "fp16", **ONE, pretrained=base, dtype=FP16)
    assert not (tmp_path / "fp16").exists()


# --- refused


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    base, output = save_base(tmp_path / "base", "mixtral"), tmp_path / "out"
    model, _ = loaded(base)

    def refused(kind, message, directory=output, model=model, **kwargs):
        with pytest.raises(kind, match=message):
            save_model(model, directory, **{**ONE, "pretrained": base, **kwargs})
        assert not output.exists()

    refused(ValueError, "max_shard_size is a number of bytes, at least 1; got 0", max_shard_size=0)
    refused(ValueError, "dtype is torch.int8; accepted", dtype=torch.int8)
    refused(ValueError, "the output .* is inside the input", directory=base / "out")
    refused(ValueError, "the output .* is inside the input", directory=base)
    refused(ValueError, "rank 1 of the layout's 2 is not in the group; all must call it", layout=DP2)
    refused(ValueError, "embed_tokens.weight is on the meta device", model=build_meta_model(base, FP32))
    refused(ValueError, "or shard the model by the layout that it is loaded with", layout=EP2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    refused(FileExistsError, "notes has no config.json, so it is not a model directory", directory=tmp_path / "notes")
    inject_lora(model, LoraConfig(r=2, target_modules=["experts"]))
    refused(ValueError, r"lora_A.\S+: save_model is for models without LoRA")


# --- kills

KILLED_AT = {  # call, how many of them come before
    "the first write": ("pwritev", 0),
    "a later write": ("pwritev", 20),
    "the wait for the disk": ("fsync", 0),
    "the first rename": ("rename", 0),
    "the second rename": ("rename", 1),
    "the end": ("rename", 2),
}


def _save_and_die(base: str, output: str, call: str, num_before: int) -> None:
    real, done = getattr(os, call), []

    def counted(*args, **kwargs):
        if len(done) == num_before:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(None)
        return real(*args, **kwargs)

    setattr(os, call, counted)
    save_one(Path(base), Path(output))


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_kill_loses_neither_the_old_model_nor_the_next_save(moment, tmp_path):
    base, output = save_base(tmp_path / "base", "llama"), tmp_path / "out"
    save_base(output, "llama", seed=7, max_shard_size="20KB")
    old = content(output)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_save_and_die, args=(str(base), str(output), *KILLED_AT[moment]))
    process.start()
    process.join()
    assert process.exitcode == (0 if moment == "the end" else -signal.SIGKILL)
    kept = output if output.exists() else tmp_path / ".out.old"
    assert (kept == output) == (moment != "the second rename")
    if moment == "the end":
        check_loads_as(output, reference(base))
    else:
        assert content(kept).keys() == old.keys()
        assert all(torch.equal(tensor, old[name]) for name, tensor in content(kept).items())
    model, _ = loaded(base)
    with pytest.raises(ValueError, match="is not finite"):  # a save that fails puts back what was in between
        model.model.norm.weight.data[0] = float("nan")
        save_model(model, output, **ONE, pretrained=base)
    assert output.exists()
    save_one(base, output)
    check_loads_as(output, reference(base))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]
