"""What MoeLoraPlugin refuses, keeps and saves."""

from types import SimpleNamespace

import pytest
import torch
from distributed import pool
from peft import LoraConfig
from tiny_models import tiny_model, token_batch

from coati_ext.checkpoint_io.load import kept_in_fp32


def plugin_and_booster(**kwargs):
    from coati_ext import compat

    compat.apply()  # before Booster is imported
    from colossalai.booster import Booster

    from coati_ext.plugin import MoeLoraPlugin

    plugin = MoeLoraPlugin(**kwargs)
    return plugin, Booster(plugin=plugin)


def boosted(family: str, *, targets=("mlp",), optimizer_class=torch.optim.AdamW, **plugin_kwargs):
    _, booster = plugin_and_booster(**plugin_kwargs)
    model = booster.enable_lora(tiny_model(family), lora_config=LoraConfig(r=4, target_modules=list(targets)))
    optimizer = optimizer_class(model.parameters(), lr=1e-2)  # frozen parameters included, as in users' scripts
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def step(booster, model, optimizer) -> float:
    ids = token_batch(2, 6)
    loss = model(input_ids=ids, labels=ids).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def error_of(kwargs: dict) -> str:
    try:
        plugin_and_booster(**kwargs)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ep_size": 3}, "ep_size=3 does not divide the world size 2"),
        ({"ep_size": 0}, "ep_size=0"),
        ({"pp_size": 2, "ep_size": 2}, "pp_size=2 x sp_size=1 x ep_size=2 does not divide the world size 2"),
        ({"pp_size": 2, "num_layers_per_stage": [1, 2, 3]}, "num_layers_per_stage must be a list of pp=2 numbers"),
        ({"pp_size": 2, "pp_style": "interleaved"}, "pp_style='interleaved' is not supported"),
        ({"sp_size": 2}, "sp_size=2 needs enable_sequence_parallelism=True"),
        ({"tp_size": 2, "ep_size": 2}, "tp_size=2 x pp_size=1 x sp_size=1 x ep_size=2 does not divide"),
        ({"zero_stage": 3}, "zero_stage must be 0, 1 or 2, got 3"),
        ({"zero_stage": 2, "pp_size": 2}, "zero_stage=2 with pp_size=2"),
        ({"precision": "fp8"}, "precision must be"),
        ({"enable_sequence_parallelism": True}, "split_gather needs tp_size > 1 and no pp_size or sp_size, got 1, 1"),
        ({"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring", "tp_size": 2}, "wrong gradients"),
        (
            {
                "sp_size": 2,
                "enable_sequence_parallelism": True,
                "sequence_parallelism_mode": "all_to_all",
                "tp_size": 2,
            },
            "2",
        ),
        ({"overlap_communication": True}, "overlap_communication"),
        ({"use_fp8": True}, "use_fp8"),
        ({"overlap_allgather": True}, "overlap_allgather"),
    ],
)
def test_what_is_not_right_is_refused_by_name(kwargs, message):
    assert all(message in answer for answer in pool(2).run(error_of, kwargs))


def test_switches_of_colossalais_scripts_are_accepted():
    kwargs = {"ep_size": 2, "tp_size": 1, "pp_size": 1, "sp_size": 1, "enable_fused_normalization": True}
    assert pool(2).run(error_of, kwargs) == ["accepted"] * 2


def misuse(which: str) -> str:
    _, booster = plugin_and_booster(ep_size=2)
    config = LoraConfig(r=4, target_modules=["mlp"])
    model = tiny_model("llama" if which == "dense" else "mixtral")
    try:
        if which == "boost first":
            booster.enable_lora(booster.boost(model)[0], lora_config=config)
        elif which == "save first":
            booster.save_lora_as_pretrained(booster.enable_lora(model, lora_config=config), "never-written")
        else:
            model = booster.enable_lora(model, lora_config=config)
        if which == "twice":
            booster.enable_lora(model, lora_config=config)
    except (ValueError, AssertionError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("boost first", "enable_lora"),
        ("save first", "boost the model first"),
        ("twice", "LoRA is enabled on this model already"),
        ("dense", "ep_size=2, but LlamaForCausalLM is dense"),
    ],
)
def test_calls_in_the_wrong_order_say_what_to_do(which, message):
    assert all(message in answer for answer in pool(2).run(misuse, which))


def frozen_before_and_after(precision: str) -> list[str]:
    """Names of frozen tensors that three steps changed, and of buffers that lost precision."""
    _, booster = plugin_and_booster(ep_size=2, precision=precision)
    model = tiny_model("deepseek_v3")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += torch.linspace(0.1, 0.2, buffer.numel())  # not representable in bf16
    if precision == "bf16":
        model = model.to(torch.bfloat16)  # as loaded from a bf16 checkpoint ...
        for reference, (name, buffer) in zip(tiny_model("deepseek_v3").buffers(), model.named_buffers(), strict=True):
            buffer.data = reference.data.clone()  # ... whose buffers transformers keeps in fp32
            if name.endswith("e_score_correction_bias"):
                buffer += torch.linspace(0.1, 0.2, buffer.numel())
    model = booster.enable_lora(model, lora_config=LoraConfig(r=4, target_modules=["all"]))
    inner = model

    def frozen():
        kept = {n: p for n, p in inner.named_parameters() if not p.requires_grad}
        kept.update({n: b for n, b in inner.named_buffers() if "tokens_per_expert" not in n})
        return {name: tensor.detach().clone() for name, tensor in kept.items()}

    before = frozen()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(3):
        step(booster, model, optimizer)
    after = frozen()
    return [n for n in before if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_leaves_base_router_and_buffers_bit_identical(precision):
    """A bf16 plugin must not cast rotary frequencies or the router's correction bias: positions, routing would move."""
    assert pool(2).run(frozen_before_and_after, precision) == [[], []]


def where_the_first_step_finds_weights() -> list[bool]:
    from coati_ext.moe.experts import MoeExperts

    booster, model, optimizer = boosted("deepseek_v3", targets=["all"], ep_size=2)
    weights = [
        (experts, name)
        for experts in model.modules()
        if isinstance(experts, MoeExperts)
        for name in ("gate_up_proj", "down_proj")
    ]
    places = [getattr(experts, name).data_ptr() for experts, name in weights]
    has_room = [experts._packed[name].holds(getattr(experts, name)) for experts, name in weights]
    step(booster, model, optimizer)
    moved = [getattr(experts, name).data_ptr() != place for (experts, name), place in zip(weights, places, strict=True)]
    return [any(moved), all(has_room) and len(has_room) > 0]


def test_boost_gives_experts_room_for_their_factors_so_that_no_step_moves_them():
    """In a step, activations between old and new weights would keep the memory of the old ones from use."""
    assert pool(2).run(where_the_first_step_finds_weights) == [[False, True], [False, True]]


def train_save_reload(directory: str) -> tuple[float, float, float]:
    booster, model, optimizer = boosted("deepseek_v3", targets=["all"], ep_size=2)
    for _ in range(2):
        step(booster, model, optimizer)
    ids = token_batch(2, 6)
    with torch.no_grad():
        trained = model(input_ids=ids).logits
    booster.save_lora_as_pretrained(model, directory)

    _, fresh = plugin_and_booster(ep_size=2)
    again = fresh.enable_lora(tiny_model("deepseek_v3"), pretrained_dir=directory)
    with torch.no_grad():
        reloaded = again(input_ids=ids).logits
        base = tiny_model("deepseek_v3")(input_ids=ids).logits
    return (trained - reloaded).abs().max().item(), (trained - base).abs().max().item()


def test_a_saved_adapter_is_where_enable_lora_can_go_on(tmp_path):
    for difference, effect in pool(2).run(train_save_reload, str(tmp_path / "adapter")):
        assert difference == 0.0
        assert effect > 0.1


def exported(layout: dict | None, directory: str) -> bool:
    """Whether the adapter that a layout saves is that of one model, with random lora_B."""
    from parity import lora_config, randomise_lora_B
    from safetensors.torch import load_file

    from coati_ext.checkpoint_io.adapter import adapter_state_dict
    from coati_ext.models.lora import inject_lora

    family, targets = layout.pop("family"), layout.pop("targets")
    _, booster = plugin_and_booster(**layout)
    model = booster.enable_lora(tiny_model(family), lora_config=lora_config(targets))
    randomise_lora_B(model)
    model, *_ = booster.boost(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    booster.save_lora_as_pretrained(model, directory)
    whole = tiny_model(family)
    inject_lora(whole, lora_config(targets), seed=torch.initial_seed())
    randomise_lora_B(whole)
    saved, expected = load_file(f"{directory}/adapter_model.safetensors"), adapter_state_dict(whole)
    return saved.keys() == expected.keys() and all(torch.equal(saved[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    "layout",
    [
        {"family": "deepseek_v3", "targets": ["mlp"], "ep_size": 2, "pp_size": 2, "num_layers_per_stage": [1, 2]},
        {"family": "deepseek_v3", "targets": ["experts"], "ep_size": 2, "pp_size": 2, "num_layers_per_stage": [1, 2]},
        {"family": "llama", "targets": [r"model\.layers\.1\..*"], "tp_size": 2, "pp_size": 2},
        {"family": "mixtral", "targets": ["all"], "ep_size": 2},
    ],
)
def test_layouts_save_the_adapter_of_one_process(layout, tmp_path):
    """Stages without experts or without any adapter cannot tell by themselves who sends."""
    assert all(pool(4).run(exported, layout, str(tmp_path / "adapter")))


def moved(family: str, plugin_kwargs: dict) -> list[str]:
    """Parameters that a step of full fine-tuning through the Booster API left as they were."""
    _, booster = plugin_and_booster(**plugin_kwargs)
    model = tiny_model(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    inner = model
    model, optimizer, *_ = booster.boost(model, optimizer)
    before = {name: p.detach().clone() for name, p in inner.named_parameters()}
    step(booster, model, optimizer)
    return [name for name, p in inner.named_parameters() if torch.equal(p, before[name])]


@pytest.mark.parametrize(
    ("family", "kwargs"), [("mixtral", {}), ("mixtral", {"ep_size": 2}), ("llama", {"tp_size": 2})]
)
def test_full_fine_tuning_moves_every_parameter_of_an_optimizer_made_before_boost(family, kwargs):
    assert pool(2).run(moved, family, kwargs) == [[], []]


def kept_in_full_fine_tuning(family: str, precision: str, load_in_16_bits: bool) -> dict:
    """What two steps of full fine-tuning through the Booster API leave as it was, and what is said of it."""
    plugin, booster = plugin_and_booster(precision=precision)
    said = []
    plugin.logger = SimpleNamespace(warning=lambda text, ranks: said.append((text, ranks)))
    model = tiny_model(family)
    if load_in_16_bits:
        kept = kept_in_fp32(model, plugin.dtype)
        for name, p in model.named_parameters():
            p.data = p.data if kept.search(name) else p.data.to(plugin.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inner = model
    model, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(2):
        step(booster, model, optimizer)
    after = dict(inner.named_parameters())
    same = [n for n in before if after[n].dtype == before[n].dtype and torch.equal(after[n], before[n])]
    return {"same": same, "dtypes": {str(after[name].dtype) for name in same}, "said": said}


@pytest.mark.parametrize("load_in_16_bits", [False, True])
def test_full_fine_tuning_in_bf16_freezes_what_the_class_keeps_in_fp32_and_says_so(load_in_16_bits):
    (answer,) = pool(1).run(kept_in_full_fine_tuning, "ernie4_5_moe", "bf16", load_in_16_bits)
    gates = [f"model.layers.{layer}.mlp.gate" for layer in (1, 2)]
    names = [f"{gate}.{leaf}" for gate in gates for leaf in ("weight", "moe_statics.e_score_correction_bias")]
    assert (sorted(answer["same"]), answer["dtypes"]) == (sorted(names), {"torch.float32"})
    text = f"not trained: 2 weights that the model keeps in fp32 ({gates[0]}.weight, …)"
    assert answer["said"] == [(text, [0])]


def test_in_fp32_nothing_is_frozen():
    (answer,) = pool(1).run(kept_in_full_fine_tuning, "ernie4_5_moe", "fp32", False)
    assert answer["said"] == [] and all("moe_statics" in name for name in answer["same"])


def zero_offload(offload: bool) -> list[float]:
    booster, model, optimizer = boosted("mixtral", ep_size=2, cpu_offload=offload)
    return [step(booster, model, optimizer) for _ in range(3)]


def test_offloaded_optimizer_states_give_the_same_losses():
    assert pool(2).run(zero_offload, True) == pool(2).run(zero_offload, False)
