"""A rank's share, rehearsed alone: it is what the rank of a real run has, and gets the rows that it would get."""

import json

import pytest
import torch
from distributed import pool

from applications import rehearse as command
from coati_ext.benchmark.one_of_many import as_rank
from coati_ext.benchmark.rehearse import Layout, _routes, _share, rehearse, table

DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "qk_nope_head_dim": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip


def shapes_of_a_real_rank(folder: str) -> dict[str, tuple[int, ...]]:
    from coati_ext import compat

    compat.apply()
    from coati_ext.checkpoint_io.load import build_meta_model
    from coati_ext.plugin import MoeLoraPlugin

    plugin = MoeLoraPlugin(ep_size=2, pp_size=2)
    model = build_meta_model(folder, plugin.dtype)
    plugin.shard(model)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_each_rank_has_what_it_has_in_a_real_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    from coati_ext import compat

    compat.apply()
    from coati_ext.plugin import MoeLoraPlugin

    for rank, real in enumerate(pool(4).run(shapes_of_a_real_rank, str(tmp_path))):
        layout = Layout(model=DEEPSEEK, world_size=4, ep=2, pp=2, rank=rank)
        with as_rank(rank, 4):
            plugin = MoeLoraPlugin(ep_size=2, pp_size=2)
            share = _share(layout, plugin, str(tmp_path), torch.device("cpu"))
        assert {name: tuple(parameter.shape) for name, parameter in share.named_parameters()} == real


def test_each_expert_gets_the_rows_that_all_ranks_would_send():
    from coati_ext.moe.dispatch import dispatch, plan_dispatch

    hidden, weights = torch.randn(10, 3), torch.rand(10, 2)
    index = torch.tensor([[0, 5], [5, 4]] * 5)  # of 6 experts, of which rank 2 of 3 has the last two
    with as_rank(2, 3) as traffic:
        plan = plan_dispatch(index, 6, torch.distributed.group.WORLD)
        rows, of_rows = dispatch(hidden, weights, plan)
        assert plan.own.groups.offs_E.tolist() == [15, 45]  # from each rank 5 and 10
        assert rows.shape == (45, 3) and of_rows.shape == (45,)
        assert traffic.all_to_all_bytes == 5 * 4 * (3 + 1)  # rows to the first rank, with their weights


@pytest.mark.parametrize("frozen_dtype", [None, "fp8"])
def test_a_stage_trains_and_tells_what_it_took(frozen_dtype):
    layout = Layout(
        model=DEEPSEEK, world_size=4, ep=2, pp=2, rank=2, batch_size=3, max_length=16, use_grad_checkpoint=True,
        frozen_dtype=frozen_dtype,
    )  # fmt: skip
    report = rehearse(layout)
    assert report["stage"] == 1 and report["layers"] == {"MoE": 2} and report["num_microbatches"] == 3
    factors = 2 * (4 * 3 * 8 * (64 + 32) + 3 * 8 * (64 + 32))  # of two layers, experts and shared experts
    assert report["bytes"]["adapter"] == 4 * factors
    of_fp8 = report["weight_bytes_by_dtype"].get("float8_e4m3fn", 0)
    matrices = 2 * (4 * 3 * 64 * 32 + 3 * 64 * 32 + 24 * 64 + 24 * 4 * 24 + 24 * 64 + 16 * 4 * 32 + 64 * 64)
    assert of_fp8 == (matrices if frozen_dtype else 0)
    sent = 16 * 4 // 2 * (64 + 1) * 4  # half the rows of a micro-batch, with their weights
    assert report["all_to_all_bytes_per_step"] >= 3 * 2 * 4 * sent  # there and back, forward and backward
    assert report["stage_bytes_per_step"] == 3 * 16 * 64 * 4
    text = table(report)
    assert "rank 2 of 4, ep 2, pp 2 (stage 1): 2 MoE layers; 3 x 16 tokens" in text
    assert "estimated: x 3 / (3 + 2 - 1) micro-batches" in text and "recompute + backward of a MoE layer" in text


def test_a_recorded_routing_is_drawn_from(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([[1, 1, 1, 1], [100, 100, 1, 0]]))
    index = _routes(str(file), 1, 500, 2, 4, torch.device("cpu"))
    counts = torch.bincount(index.flatten(), minlength=4)
    assert counts[3] == 0 and counts[2] < 50 and abs(counts[0] - counts[1]) < 50
    assert (index[:, 0] != index[:, 1]).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep", "3", "--world_size", "4"], "--ep 3 x --pp 1 does not divide --world_size 4"),
        (["--ep", "16", "--world_size", "16"], "has 8 experts, which ep_size=16 does not divide"),
        (["--rank", "1"], "--rank must be from 0 to 0, got 1"),
        (["--routing", "even"], "--routing even: neither balanced, uniform"),
        (["--frozen_dtype", "int4"], "--frozen_dtype must be fp8"),
        (["--fp8_compute"], "--fp8_compute needs --frozen_dtype fp8"),
        (["--gpu_gb", "0"], "--gpu_gb must be above 0, got 0.0"),
        (["--num_layers", "5"], "--num_layers 5: the model has 4"),
        (["--lora_targets", "w9"], "w9"),
    ],
)
def test_wrong_flags_are_told(flags, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    assert command.main(["--model", str(tmp_path), "--max_length", "8", *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type is missing or no str"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is missing or no int"),
        ({"model_type": "gpt9"}, "the config makes no model: "),
        ({"hidden_size": "wide"}, "the config makes no model: "),
    ],
)
def test_a_config_that_makes_no_model_is_told_in_one_line(change, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | change))
    assert command.main(["--model", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rehearse: error: --model {tmp_path}: {message}")


@pytest.mark.parametrize("counts", ["[1, 2]", "[1, 0, 0, 0, 0, 0, 0, 0]", "[[1]]", "{}"])
def test_a_routing_that_does_not_fit_the_model_is_told(counts, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(counts)
    with pytest.raises(ValueError, match="--routing"):
        _routes(str(file), 1, 5, 2, 8, torch.device("cpu"))


def test_a_share_that_does_not_fit_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))

    def too_much(layout):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr("coati_ext.benchmark.rehearse.rehearse", too_much)
    assert command.main(["--model", str(tmp_path)]) == 1
    assert "the share does not fit this GPU: CUDA out of memory. Tried to allocate 9.00 GiB." in capsys.readouterr().err
