"""Sequence parallelism: the losses and gradients of one process, and a refusal by name of what it does not cover."""

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from parity import lora_config, randomise_lora_B
from tiny_models import _DECODER, VOCAB, tiny_model
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM, DynamicCache

from coati_ext.models.lora import inject_lora
from coati_ext.models.loss import GPTLMLoss, num_supervised_tokens
from coati_ext.models.recompute import enable_recompute
from coati_ext.models.sequence_parallel import exchange, sequence_chunk, shard_sequence
from coati_ext.models.shard import shard_decoder, stage_forward

# Sums over tokens and over heads are taken in another order; measured at most 2.5e-6 of a tensor's largest value.
TOLERANCE = 1e-5

BRIEF = ["llama", "qwen2", "qwen3_moe", "mixtral", "deepseek_v3"]
OTHERS = [
    "deepseek_v2", "deepseek_v2_lite", "moonlight", "qwen2_moe", "glm4_moe", "glm4_moe_lite", "olmoe", "dots1",
    "ernie4_5_moe", "minimax_m2", "hunyuan_v1_moe", "solar_open", "mellum", "flex_olmo", "longcat_flash", "granitemoe",
    "phimoe",
]  # fmt: skip


def build(family: str, attention: str = "sdpa", **kwargs) -> nn.Module:
    if family == "qwen2":
        torch.manual_seed(0)
        config = CONFIG_MAPPING["qwen2"](**{**_DECODER, "initializer_range": 0.2, "use_cache": False, **kwargs})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = tiny_model(family, **kwargs)
    model.set_attn_implementation(attention)
    return model.train()


def rows(lengths: tuple[int, ...], seed: int = 3) -> dict[str, torch.Tensor]:
    """Right-padded rows; the first third of each is not supervised. Padding has odd ids, which must not matter."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=generator)
    mask, labels = torch.zeros_like(ids), ids.clone()
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        labels[row, : length // 3] = labels[row, length:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def prepare(family: str, options: dict, sp_group: dist.ProcessGroup | None = None) -> nn.Module:
    model = build(family, options.get("attention", "sdpa"), **options.get("config", {}))
    if sp_group is not None and options.get("lora_last"):
        shard_sequence(model, sp_group)
    if options.get("lora"):
        inject_lora(model, lora_config(options["lora"]), seed=0)
        randomise_lora_B(model)
    if options.get("recompute"):
        enable_recompute(model)
        model.train()
    shard_sequence(model, sp_group)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def whole(family: str, batch: dict[str, torch.Tensor], options: dict) -> tuple[float, dict[str, torch.Tensor]]:
    model = prepare(family, options)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = GPTLMLoss()(logits, batch["labels"])  # 0 where nothing is supervised
    loss.backward()
    return loss.item(), gradients(model)


def chunked(family: str, batch: dict[str, torch.Tensor], options: dict, group_size: int = 0):
    """Loss and gradients of this rank's chunk, summed over all ranks; subgroups of `group_size` take rows in turn."""
    sp_group = dist.group.WORLD if not group_size else dist.new_subgroups(group_size)[0]
    model = prepare(family, options, sp_group)
    num_tokens = num_supervised_tokens(batch["labels"]).clamp(min=1)
    if group_size:
        groups = dist.get_world_size() // group_size
        batch = {name: value[dist.get_rank() // group_size :: groups] for name, value in batch.items()}
    part = sequence_chunk(batch, dist.get_rank(sp_group), dist.get_world_size(sp_group))
    targets = part.pop("targets")
    counts = torch.stack([num_supervised_tokens(targets, shifted=True), part["attention_mask"].sum()])
    dist.all_reduce(counts)
    loss = GPTLMLoss()(model(**part).logits, targets, num_tokens, shifted=True)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return total.item(), grads, counts.tolist()


def check(family: str, world: int, lengths: tuple[int, ...], *, group_size: int = 0, **options) -> None:
    batch = rows(lengths)
    loss, expected = whole(family, batch, options)
    results = pool(world).run(chunked, family, batch, options, group_size)
    for got, grads, counts in results:
        assert counts == [int(num_supervised_tokens(batch["labels"])), sum(lengths)]
        assert abs(got - loss) <= TOLERANCE * abs(loss)
        assert grads.keys() == expected.keys() and expected
        for name, reference in expected.items():
            assert reference.abs().max() > 0 or "lora" not in name, name
            error = (grads[name] - reference).abs().max()
            assert error <= TOLERANCE * reference.abs().max(), (name, error, reference.abs().max())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", BRIEF)
def test_two_ranks_give_the_gradients_of_one(family, attention):
    check(family, 2, (11, 6, 9), attention=attention)


@pytest.mark.parametrize("family", BRIEF)
def test_four_ranks_give_the_gradients_of_one(family):
    check(family, 4, (13, 7), config={"num_key_value_heads": 4})


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_need_no_code(family):
    check(family, 2, (11, 6))


@pytest.mark.parametrize("lengths", [(1,), (3, 1), (9, 2, 3), (5,)], ids=str)
def test_chunks_that_are_all_padding_and_rows_that_ranks_do_not_divide(lengths):
    check("mixtral", 4, lengths, config={"num_key_value_heads": 4})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_gradient_checkpointing(family):
    check(family, 2, (11, 6), recompute=True)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_lora(family, recompute):
    check(family, 2, (10, 7), lora=["all"], recompute=recompute)


def test_lora_injected_and_recompute_enabled_afterwards():
    check("mixtral", 2, (10, 7), lora=["all"], recompute=True, lora_last=True)


def test_lora_on_the_queries_alone():
    check("llama", 2, (10, 7), lora=["q_proj"])


def test_two_groups_side_by_side_have_rows_of_their_own():
    check("qwen3_moe", 4, (11, 6, 9, 3), group_size=2)


def staged(family: str, batch: dict[str, torch.Tensor], layers_per_stage: tuple[int, ...]):
    """As `chunked`, the model cut into pipeline stages that run one after the other in this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = sequence_chunk(batch, rank, size)
    targets = part.pop("targets")
    stages, hidden_states = [], None
    for index in range(len(layers_per_stage)):
        stage = prepare(family, {})
        shard_decoder(stage, layers_per_stage=layers_per_stage, stage=index)
        shard_sequence(stage, dist.group.WORLD)
        is_last = index == len(layers_per_stage) - 1
        out = stage_forward(stage, is_first=index == 0, is_last=is_last, hidden_states=hidden_states, **part)
        hidden_states = None if is_last else out["hidden_states"]
        stages.append(stage)
    GPTLMLoss()(out.logits, targets, num_supervised_tokens(batch["labels"]), shifted=True).backward()
    grads = {name: grad for stage in stages for name, grad in gradients(stage).items()}
    for grad in grads.values():
        dist.all_reduce(grad)
    return grads


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_pipeline_stages(family):
    batch = rows((11, 6))
    expected = whole(family, batch, {})[1]
    layers = (1, 1) if family == "llama" else (1, 2)
    for grads in pool(2).run(staged, family, batch, layers):
        assert grads.keys() == expected.keys()
        for name, reference in expected.items():
            assert (grads[name] - reference).abs().max() <= TOLERANCE * reference.abs().max(), name


def packed_piece(dtype: torch.dtype) -> list[bool]:
    """The exchange on numbers that say where they come from, there and back, with parts of unlike sizes and dtypes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole_q = torch.arange(2 * 8 * 12 * 3.0).reshape(2, 8, 12, 3) % 251
    whole_v = torch.arange(2 * 4 * 12 * 5.0).reshape(2, 4, 12, 5) % 241
    mine = [
        w.chunk(size, dim=2)[rank].clone().to(t).requires_grad_()
        for w, t in [(whole_q, dtype), (whole_v, torch.float32)]
    ]
    query, value = exchange(mine, dist.group.WORLD)
    heads = [w.chunk(size, dim=1)[rank] for w in (whole_q, whole_v)]
    back = exchange([query.transpose(1, 2)], dist.group.WORLD)[0].transpose(1, 2)
    (back.float() * 2).sum().backward()
    return [
        torch.equal(query, heads[0].to(dtype)) and query.dtype == dtype,
        torch.equal(value, heads[1]) and value.dtype == torch.float32,
        torch.equal(back, mine[0]),
        torch.equal(mine[0].grad, torch.full_like(mine[0], 2)) and not mine[1].grad.any(),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_the_exchange_is_exact_in_every_dtype(world, dtype):
    assert all(all(found) for found in pool(world).run(packed_piece, dtype))


def flash_conventions() -> list:
    """What flash attention is called with, seen by a stand-in of its name that computes with SDPA."""
    calls = []

    def stand_in(module, query, key, value, attention_mask, **kwargs):
        calls.append(
            (module.config._attn_implementation, module.layer_idx, tuple(query.shape), attention_mask, sorted(kwargs))
        )
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)

    model = build("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    before = AttentionInterface()["flash_attention_2"]
    AttentionInterface.register("flash_attention_2", stand_in)
    try:
        shard_sequence(model, dist.group.WORLD)
        model(**sequence_chunk({"input_ids": rows((8,))["input_ids"]}, dist.get_rank(), dist.get_world_size()))
    finally:
        AttentionInterface.register("flash_attention_2", before)
    return calls


def test_flash_attention_sees_its_own_name_whole_rows_and_no_mask():
    for calls in pool(2).run(flash_conventions):
        assert calls == [("flash_attention_2", layer, (1, 2, 8, 8), None, ["dropout", "scaling"]) for layer in range(2)]


def why_refused(family: str, config: dict, attention: str) -> tuple[str, bool]:
    """The error of `shard_sequence`, and whether it left the model as it was."""
    model = build(family, attention, **config)
    before = model.config._attn_implementation
    try:
        shard_sequence(model, dist.group.WORLD)
    except ValueError as error:
        return str(error), model.config._attn_implementation == before
    return "", False


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    **DYNAMIC,
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
MAX_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "config", "attention", "words"),
    [
        (
            "mixtral",
            THREE_HEADS,
            "sdpa",
            ["num_attention_heads is 3", "2 ranks"],
        ),
        ("mixtral", {"num_key_value_heads": 1}, "sdpa", ["num_key_value_heads is 1", "2 ranks"]),
        ("mixtral", {"sliding_window": 4}, "sdpa", ["config.sliding_window is 4"]),
        ("qwen2", MAX_WINDOW, "sdpa", ["'sliding_attention'"]),
        ("exaone_moe", {}, "sdpa", ["'sliding_attention'"]),
        ("gpt_oss", {}, "eager", ["'sliding_attention'"]),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2, "sliding_window": None}, "eager", [".sinks"]),
        ("minimax", {}, "sdpa", ["'linear_attention'"]),
        ("qwen3_next", {}, "sdpa", ["Qwen3NextForCausalLM carries a state"]),
        ("jamba", {}, "sdpa", ["JambaForCausalLM carries a state"]),
        ("nemotron_h", {}, "sdpa", ["NemotronHForCausalLM carries a state"]),
        ("deepseek_v32", {}, "sdpa", ["'indexed_attention'"]),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "sdpa", ["layers.0.self_attn.indexer chooses"]),
        ("llama", {"attention_dropout": 0.1}, "sdpa", ["config.attention_dropout is 0.1"]),
        ("llama", {"rope_parameters": DYNAMIC}, "sdpa", ["'dynamic'"]),
        ("llama", {"rope_parameters": LONG}, "sdpa", ["'longrope'"]),
        ("llama", {}, "flex_attention", ["'flex_attention'"]),
    ],
    ids=lambda value: None if isinstance(value, dict | list) else value,
)
def test_what_it_does_not_cover_is_refused_and_left_alone(family, config, attention, words):
    for error, untouched in pool(2).run(why_refused, family, config, attention):
        assert untouched and error.startswith("sp=2: ")
        assert all(word in error for word in words), error


def why_doctored(change: str) -> str:
    model = build("llama")
    layer = model.model.layers[1]
    if change == "convolution":
        layer.mixer = nn.Conv1d(32, 32, 4)
    elif change == "no attention":
        layer.self_attn = nn.Linear(32, 32)
    elif change == "both ways":
        layer.self_attn.is_causal = False
    elif change == "softcap":
        model.config.attn_logit_softcapping = 50.0
    elif change == "no interface":
        model._supports_attention_backend = False
    try:
        shard_sequence(model, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("convolution", "model.layers.1.mixer is a convolution"),
        ("no attention", "layers.1 (LlamaDecoderLayer) has no causal attention"),
        ("both ways", "layers.1.self_attn: its attention is not causal"),
        ("softcap", "config.attn_logit_softcapping is 50.0"),
        ("no interface", "attention interface"),
    ],
)
def test_a_model_that_mixes_tokens_in_another_way_is_refused(change, words):
    assert all(words in error for error in pool(2).run(why_doctored, change))


def test_yarn_is_the_same_for_every_chunk():
    check("llama", 2, (40, 33), config={"rope_parameters": YARN})


def forward_errors() -> dict[str, str]:
    """Errors of forwards that are not over this rank's chunk, or that ask attention for something else."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build("mixtral")
    shard_sequence(model, dist.group.WORLD)
    ids = rows((8,))["input_ids"]
    part = sequence_chunk({"input_ids": ids}, rank, size)
    mine, positions = part["input_ids"], part["position_ids"]
    longer = sequence_chunk({"input_ids": torch.cat([ids, ids], dim=1 - rank)}, rank, size)
    calls = {
        "no positions": lambda: model(input_ids=mine),
        "whole row": lambda: model(input_ids=ids, position_ids=torch.arange(8)[None]),
        "packed on one rank": lambda: model(input_ids=mine, position_ids=positions * torch.tensor([1, 1, 1 - rank, 1])),
        "another number of rows or tokens": lambda: model(**longer),
        "cache": lambda: model(**part, use_cache=True),
        "filled cache": lambda: model(**part, past_key_values=DynamicCache()),
        "generation": lambda: model.generate(mine, max_new_tokens=1, do_sample=False),
        "generation without a cache": lambda: model.generate(mine, max_new_tokens=1, use_cache=False),
        "mask": lambda: model(**{**part, "attention_mask": torch.zeros(1, 1, 4, 4)}),
        "softcap": lambda: model(**part, softcap=3.0),
        "output_attentions": lambda: model(**part, output_attentions=True),
        "sinks": lambda: model(**part, s_aux=torch.zeros(4)),
        "both ways": lambda: model(**part, is_causal=False),
        "said to be causal": lambda: model(**part, is_causal=True),
        "dropout": lambda: _with(model.model.layers[1].self_attn, "attention_dropout", 0.5, lambda: model(**part)),
        "window": lambda: _with(model.config, "sliding_window", 3, lambda: model(**part)),
    }
    return {name: _error(call) for name, call in calls.items()}


def _with(owner, name, value, call):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return call()
    finally:
        setattr(owner, name, before)


def _error(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "none"


def test_a_forward_that_it_does_not_cover_is_refused_on_every_rank():
    words = {
        "no positions": "no position_ids",
        "whole row": "do not make up whole rows",
        "packed on one rank": "do not make up whole rows",
        "another number of rows or tokens": "do not make up whole rows",
        "cache": "use_cache = False",
        "filled cache": "use_cache = False",
        "generation": "sp: ",
        "generation without a cache": "cannot generate",
        "mask": "not plainly causal",
        "softcap": "softcap=3.0",
        "output_attentions": "output_attentions=True",
        "sinks": "s_aux=Tensor",
        "both ways": "not plainly causal",
        "said to be causal": "none",
        "dropout": "dropout=0.5",
        "window": "not plainly causal",
    }
    for found in pool(2).run(forward_errors, timeout=60):
        assert found.keys() == words.keys()
        assert {name: word for name, word in words.items() if word not in found[name]} == {}, found


def called_twice() -> list:
    model = build("llama")
    shard_sequence(model, None)
    alone = model.config._attn_implementation
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    shard_sequence(model, groups[0])
    hooks = len(model.base_model._forward_pre_hooks)
    shard_sequence(model, groups[0])
    try:
        shard_sequence(model, groups[1])
    except ValueError as error:
        return [alone, hooks, len(model.base_model._forward_pre_hooks), str(error)]
    return []


def test_a_second_call_changes_nothing_and_a_second_group_is_refused():
    for alone, hooks, hooks_after, error in pool(2).run(called_twice):
        assert alone == "sdpa" and hooks == hooks_after == 1
        assert "another sp group" in error
