"""Tensor parallelism against plain transformers on one process, in fp32.

Tolerance: 1e-5 of a tensor's largest element; summing in another order moves the last bits only.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from parity import randomise_lora_B
from torch import nn

from coati_ext.models.loss import GPTLMLoss
from coati_ext.models.tensor_parallel import shard_tensor_parallel
from coati_ext.models.tensor_parallel_layers import mark_cuts
from tests.models.parallel_models import assert_same, batch, joined, own_slice, prepare, whole_model


def step(model: nn.Module, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(Logits, loss) after one backward."""
    inputs = batch(length)
    logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    # A sequence of one token has nothing to predict: a sum of squares takes the loss's place.
    loss = GPTLMLoss()(logits, inputs["labels"]) if length > 1 else logits.square().mean()
    loss.backward()
    return logits.detach(), loss.detach()


def reference(
    family: str, length: int, *, lora: bool, dropout: float = 0.0, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model = prepare(whole_model(family, **kwargs), lora, dropout)
    randomise_lora_B(model)
    model.train(dropout > 0)
    torch.manual_seed(7)
    return *step(model, length), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def sharded(
    family: str, length: int, lora: bool, sequence_parallel: bool, dropout: float, checkpointing: bool, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The same on this rank of the pool; gradients put together by `tp_cut`."""
    model = whole_model(family, **kwargs)
    shard_tensor_parallel(model, dist.group.WORLD, sequence_parallel=sequence_parallel)
    prepare(model, lora, dropout)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                parameter.copy_(own_slice(whole_lora_B(name, parameter), parameter))
    model.train(dropout > 0 or checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        other = model(batch(length + 3)["input_ids"]).logits.sum()  # another forward before this one's backward
    torch.manual_seed(7)
    result = step(model, length)
    grads = {name: joined(p, p.grad) for name, p in model.named_parameters() if p.requires_grad}
    if checkpointing:
        other.backward()
    return *result, grads


def whole_lora_B(name: str, parameter: nn.Parameter) -> torch.Tensor:
    shape = list(parameter.shape)
    if hasattr(parameter, "tp_cut"):
        shape[parameter.tp_cut.dim] = parameter.tp_cut.full
    holder = nn.Module()
    holder.named_parameters = lambda: [(name, whole)]
    whole = nn.Parameter(torch.empty(shape))
    randomise_lora_B(holder)
    return whole.detach()


def check(
    family: str,
    tp: int,
    length: int,
    *,
    lora: bool,
    sequence_parallel: bool,
    dropout: float = 0.0,
    checkpointing: bool = False,
    **kwargs: Any,
) -> None:
    expected = reference(family, length, lora=lora, dropout=dropout, **kwargs)
    results = pool(tp).run(sharded, family, length, lora, sequence_parallel, dropout, checkpointing, kwargs)
    for logits, loss, grads in results:
        assert_same(logits, expected[0], "logits")
        assert_same(loss, expected[1], "loss")
        assert list(grads) == list(expected[2]) and grads
        # Attention to one token alone has a gradient of zero for queries and keys, of which rounding makes some.
        least = max(grad.abs().max().item() for grad in grads.values()) if length == 1 else 1e-12
        for name, grad in grads.items():
            assert_same(grad, expected[2][name], name, least)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_tied", "qwen3"])
def test_tp_2_equals_one_process(family, lora, sequence_parallel):
    check(family, 2, 7, lora=lora, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2_tied"])
def test_tp_4_equals_one_process(family, lora, sequence_parallel):
    check(family, 4, 7, lora=lora, sequence_parallel=sequence_parallel, num_key_value_heads=4)


@pytest.mark.parametrize("length", [1, 4, 5])  # three ranks without a token; one each; one rank without
def test_sequence_parallel_takes_any_length(length):
    check("qwen2", 4, length, lora=True, sequence_parallel=True, num_key_value_heads=4)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "phi3", "olmo2", "glm4"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_other_families_equal_one_process(family, sequence_parallel):
    for lora in (False, True):
        check(family, 2, 7, lora=lora, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_latent_attention_equals_one_process(sequence_parallel):
    for lora in (False, True):
        check("minicpm3", 2, 7, lora=lora, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_lora_dropout_drops_what_one_process_drops(sequence_parallel):
    check("llama", 2, 7, lora=True, sequence_parallel=sequence_parallel, dropout=0.4)


def test_sequence_parallel_with_checkpointed_layers_and_two_forwards_in_flight():
    check("llama", 2, 7, lora=True, sequence_parallel=True, checkpointing=True)


def generated(sequence_parallel: bool) -> list[int]:
    model = whole_model("llama")
    if dist.is_initialized():
        shard_tensor_parallel(model, dist.group.WORLD, sequence_parallel=sequence_parallel)
    inputs = batch(7)
    settings = dict(max_new_tokens=5, do_sample=False, use_cache=True, eos_token_id=None)
    return model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings).tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_generation_with_a_cache_equals_one_process(sequence_parallel):
    expected = generated(sequence_parallel)
    assert pool(2).run(generated, sequence_parallel) == [expected, expected]


def num_all_reduces() -> tuple[int, int]:
    """In the forward and the backward pass of a model with LoRA on everything."""
    model = whole_model("llama")
    shard_tensor_parallel(model, dist.group.WORLD)
    prepare(model, lora=True)
    with patch("torch.distributed.all_reduce", wraps=dist.all_reduce) as all_reduce:
        logits = model(batch(7)["input_ids"]).logits
        forward = all_reduce.call_count
        logits.sum().backward()
    return forward, all_reduce.call_count - forward


def test_base_and_lora_communicate_together():
    layers, blocks, linears = 2, 2, 7
    forward = 1 + layers * blocks  # the embedding, and the end of each block
    # Each block's input, but for the first one: nothing before it is trained; the head; a factor of each linear.
    backward = layers * blocks - 1 + 1 + layers * linears
    assert pool(2).run(num_all_reduces) == [(forward, backward)] * 2


def gradients_after_loading() -> tuple[bool, dict[str, torch.Tensor]]:
    """Sharded on the meta device, then every parameter replaced by one with data."""
    whole = whole_model("qwen3")
    with torch.device("meta"):
        model = whole_model("qwen3")
    shard_tensor_parallel(model, dist.group.WORLD, sequence_parallel=True)
    values = {n: own_slice(whole.state_dict()[n], p).clone() for n, p in model.named_parameters()}
    model.load_state_dict(values, assign=True)
    model.model.rotary_emb = whole.model.rotary_emb
    lost = not any(hasattr(p, "tp_cut") for p in model.parameters())
    mark_cuts(model)
    step(model, 7)
    return lost, {name: joined(p, p.grad) for name, p in model.named_parameters()}


def test_weights_may_be_loaded_after_sharding():
    _, _, expected = reference("qwen3", 7, lora=False)
    for lost, grads in pool(2).run(gradients_after_loading):
        assert lost  # or mark_cuts has nothing to mend
        for name, grad in grads.items():
            assert_same(grad, expected[name], name)
