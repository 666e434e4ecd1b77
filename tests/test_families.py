"""Every supported MoE family: trains as one process does, exports, and loads in stock PEFT; the others are refused.

Tiny random models of the real classes, under ep 2.
"""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from parity import lora_config, reference, run_layout
from peft import LoraConfig, PeftModel
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN
from safetensors.torch import load_file
from tiny_models import CONFIGS, tiny_model, token_batch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coati_ext.checkpoint_io.adapter import frozen_router_hash
from coati_ext.checkpoint_io.names import EXPERT_NAMES
from coati_ext.checkpoint_io.verify import verify_adapter
from coati_ext.models.lora import inject_lora
from coati_ext.models.targets import KINDS, candidates, resolve_targets
from coati_ext.moe.experts import is_experts_module
from coati_ext.utils.peft_warnings import ignore_pattern_warnings
from coati_ext.utils.preflight import MOE_FAMILIES, check_family, num_experts
from tests.plugin.test_parity import assert_same_gradients

# Modules in the tiny models: routed experts (one a layer), shared experts, dense MLP, attention, as in KINDS.
NUM_MODULES = {
    "mixtral": (2, 0, 0, 8),
    "minimax": (2, 0, 0, 7),
    "minimax_m2": (2, 0, 0, 8),
    "qwen2_moe": (2, 6, 3, 12),
    "qwen3_moe": (2, 0, 0, 8),
    "qwen3_next": (2, 6, 0, 7),
    "deepseek_v2": (2, 6, 3, 15),
    "deepseek_v2_lite": (2, 6, 3, 12),
    "deepseek_v3": (2, 6, 3, 15),
    "moonlight": (2, 6, 3, 12),
    "deepseek_v32": (2, 6, 3, 15),
    "glm4_moe": (2, 6, 3, 12),
    "glm4_moe_lite": (2, 6, 3, 15),
    "glm_moe_dsa": (2, 6, 3, 15),
    "olmoe": (2, 0, 0, 8),
    "flex_olmo": (2, 0, 0, 8),
    "dots1": (2, 6, 3, 12),
    "ernie4_5_moe": (2, 6, 3, 12),
    "hunyuan_v1_moe": (2, 6, 0, 8),
    "solar_open": (3, 9, 0, 12),
    "exaone_moe": (2, 6, 3, 12),
    "mellum": (2, 0, 3, 12),
    "afmoe": (2, 6, 3, 15),
    "cohere2_moe": (2, 6, 3, 12),
}
families = pytest.mark.parametrize("family", NUM_MODULES)

# fp32 logits of a few units: transformers sums over experts in another order than our grouped GEMM.
ROUNDING = 2e-5


def model_type(family: str) -> str:
    return CONFIGS[family]().model_type


def test_every_accepted_family_is_tested():
    assert {model_type(family) for family in NUM_MODULES} == MOE_FAMILIES


def test_all_that_peft_converts_and_the_experts_layer_computes_is_accepted():
    converted = {t for t, pattern in _MODEL_TO_CONVERSION_PATTERN.items() if pattern in EXPERT_NAMES} | {"qwen2_moe"}
    decoders = converted & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert decoders - {"longcat_flash"} == MOE_FAMILIES


# --- training and export


@families
def test_gradients_under_ep_2_equal_one_process(family):
    losses, norms, grads = reference(family, ["all"], num_used=None)
    for rank_losses, rank_norms, rank_grads in pool(2).run(run_layout, family, ["all"], 2, 1):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert rank_norms == pytest.approx(norms, rel=1e-5)
        assert_same_gradients(rank_grads, grads)
    assert not [name for name, grad in grads.items() if not grad.any()]  # or the comparison would be of zeros


def train_and_export(family: str, targets: str, directory: str) -> tuple[torch.Tensor, bool, list]:
    """Two steps of AdamW and an export: (logits, whether the router is as it was, rows of the preflight table)."""
    from coati_ext import compat

    compat.apply()  # before Booster is imported
    from colossalai.booster import Booster

    from coati_ext.plugin import MoeLoraPlugin

    booster = Booster(plugin=MoeLoraPlugin(ep_size=2))
    model = booster.enable_lora(tiny_model(family), lora_config=lora_config([targets]))
    inner, before = model, frozen_router_hash(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        ids = token_batch(4, 9, seed=10 + 2 * step + dist.get_rank())
        booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.save_lora_as_pretrained(model, directory)
    with torch.no_grad():
        logits = model(input_ids=token_batch()).logits
    return logits, before == frozen_router_hash(inner), inner.lora_report.rows


@families
@pytest.mark.parametrize("targets", ["all", "mlp"])
def test_stock_peft_computes_what_was_trained(family, targets, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_model(family).save_pretrained(base)
    in_model = dict(zip(KINDS, NUM_MODULES[family], strict=True))
    answers = pool(2).run(train_and_export, family, targets, str(adapter))
    for _, router_is_frozen, rows in answers:
        assert router_is_frozen
        assert {row.kind: row.num_in_model for row in rows} == in_model
        adapted = in_model if targets == "all" else in_model | {"attention": 0}
        assert {row.kind: row.num_modules for row in rows} == adapted

    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad(), warnings.catch_warnings():
        ignore_pattern_warnings()
        plain = stock(token_batch()).logits
        stock = PeftModel.from_pretrained(stock, str(adapter)).eval()
        for logits, *_ in answers:
            torch.testing.assert_close(stock(token_batch()).logits, logits, rtol=0, atol=ROUNDING)
            assert (plain - logits).abs().max() > 1e-2

    report = verify_adapter(base, adapter)
    assert report.passed, report.format()
    num_targets = len(resolve_targets(tiny_model(family), [targets]))
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert report.tensors_applied == report.tensors_in_file == len(tensors)
    assert len({_target(key) for key in tensors}) == num_targets
    trained = {_target(key) for key, tensor in tensors.items() if "lora_B" in key and tensor.any()}
    assert len(trained) == num_targets  # of routed experts, at least one expert of each layer and projection


def _target(key: str) -> str:
    """The module, without the number of the expert: one name for a projection of all experts of a layer."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", key.partition(".lora_")[0])


# --- the router


def _routing_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What decides the routing: all of a MoE block but its experts, shared experts and their norms."""
    blocks = [name.rpartition(".")[0] for name, module in model.named_modules() if is_experts_module(module)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        block = next((b for b in blocks if name.startswith(f"{b}.")), None)
        inside = name.removeprefix(f"{block}.")
        if block and not inside.startswith(("experts.", "shared_expert.", "shared_experts.", "shared_mlp.")):
            yield name, tensor


@families
def test_the_router_hash_sees_every_routing_tensor(family):
    model = tiny_model(family)
    routing = list(_routing_tensors(model))
    assert len(routing) >= NUM_MODULES[family][0]
    start = frozen_router_hash(model)
    for name, tensor in routing:
        kept = tensor.detach().clone()
        tensor.data.flatten()[-1] += 1e-3
        assert frozen_router_hash(model) != start, name
        tensor.data.copy_(kept)
    assert frozen_router_hash(model) == start


@families
def test_no_routing_tensor_can_be_adapted(family):
    model = tiny_model(family)
    routing = {name for name, _ in _routing_tensors(model)}
    adaptable = {candidate.path for candidate in candidates(model)}
    assert not {f"{path}.weight" for path in adaptable} & routing
    inject_lora(model, LoraConfig(r=4, target_modules=["all"]))
    assert {name for name, _ in _routing_tensors(model)} == routing  # an adapter there would be another name


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next"])
def test_the_shared_experts_gate_is_frozen_and_no_target(family):
    with pytest.raises(ValueError, match="'shared_expert_gate' names the router"):
        resolve_targets(tiny_model(family), ["shared_expert_gate"])


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_indexer_of_sparse_attention_is_no_target(family):
    """It ends in top-k indices: an adapter there would get no gradient."""
    assert any(".indexer.wk." in name for name, _ in tiny_model(family).named_parameters())
    assert not [c.path for c in candidates(tiny_model(family)) if "indexer" in c.path]


# --- what config.json tells


@families
def test_an_accepted_family_passes_by_its_config_json(family, tmp_path):
    config = CONFIGS[family]()
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    check_family(saved)
    (experts,) = {m.down_proj.shape[0] for m in tiny_model(family).modules() if is_experts_module(m)}
    assert num_experts(saved) == experts


REFUSED = {
    "gpt_oss": "'gpt_oss'.*biases and transposed",
    "nemotron_h": "'nemotron_h'.*no gate",
    "longcat_flash": "'longcat_flash'.*no weights",
    "phimoe": "'phimoe'.*PEFT has no conversion",
    "granitemoe": "'granitemoe'.*PEFT has no conversion",
    "jamba": "'jamba'.*PEFT has no conversion",
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_their_config_json(family, tmp_path):
    CONFIGS[family]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{REFUSED[family]}.*Supported:.*deepseek_v3"):
        check_family(json.loads((tmp_path / "config.json").read_text()))


def test_the_command_refuses_before_it_imports_transformers(tmp_path):
    """And before it speaks of the quantisation: a converted gpt-oss would be refused all the same."""
    CONFIGS["gpt_oss"](quantization_config={"quant_method": "mxfp4"}).save_pretrained(tmp_path)
    code = "import sys; sys.modules['transformers'] = None; from applications.lora_finetune import main; main()"
    flags = ["--pretrained", tmp_path, "--dataset", "no.jsonl", "--plugin", "moe", "--lora_rank", "4"]
    command = [sys.executable, "-c", code, *map(str, flags), "--save_dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: --pretrained: LoRA on a MoE with model_type 'gpt_oss'"), done.stderr


def error_of_enable_lora(family: str) -> str:
    from coati_ext import compat

    compat.apply()
    from colossalai.booster import Booster

    from coati_ext.plugin import MoeLoraPlugin

    try:
        Booster(plugin=MoeLoraPlugin()).enable_lora(tiny_model(family), lora_config=lora_config(["all"]))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("family", REFUSED)
def test_and_by_enable_lora_for_scripts_without_a_preflight(family):
    """Both rules agree: what config.json is refused for is really not possible."""
    (answer,) = pool(1).run(error_of_enable_lora, family)
    assert "would drop" in answer or "no transformers 5 experts module" in answer


def test_kimi_k2_is_refused_with_what_to_do_and_the_change_works(tmp_path):
    """Its config.json names a class of its own, which transformers would ask to run remote code for."""
    config = CONFIGS["moonlight"]().to_dict() | {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    with pytest.raises(ValueError, match=r"set model_type to 'deepseek_v3' in config\.json"):
        check_family(config)
    changed = config | {"model_type": "deepseek_v3"}
    check_family(changed)
    (tmp_path / "config.json").write_text(json.dumps(changed))
    loaded = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert type(AutoModelForCausalLM.from_config(loaded)).__name__ == "DeepseekV3ForCausalLM"


def test_dense_models_pass_whatever_their_type():
    check_family({"model_type": "phimoe"})
    check_family({"model_type": "granitemoehybrid", "num_local_experts": 0})
    check_family({"hidden_size": 32})
