"""Generation against full forwards of one prompt at a time, in fp32.

The reference has no cache, no padding and no batch. Tolerance of log-probs: 1e-5; summing in another order moves the
last bits only.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from parity import lora_config, randomise_lora_B, starve
from tiny_models import VOCAB, tiny_model, token_batch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from coati_ext.models import decode_engine
from coati_ext.models.generation import Completions, Sampling, generate
from coati_ext.models.lora import inject_lora
from coati_ext.models.shard import PassThrough
from coati_ext.models.tensor_parallel import shard_tensor_parallel
from coati_ext.moe.experts import MoeExperts
from tests.test_families import NUM_MODULES

LENGTHS = (3, 9, 5, 9, 1)
PROMPTS = [token_batch(1, length, seed=number)[0].tolist() for number, length in enumerate(LENGTHS)]
GREEDY = Sampling(max_new_tokens=14, temperature=0, stop_ids=tuple(range(0, VOCAB, 6)))
STOPS = Sampling(max_new_tokens=12, stop_ids=tuple(range(0, VOCAB, 12)))  # at a random token after 12 in the mean


def adapted(family: str, *, ep_group: dist.ProcessGroup | None = None, num_used: int | None = None) -> nn.Module:
    model = tiny_model(family)
    inject_lora(model, lora_config(["all"]), ep_group=ep_group)
    randomise_lora_B(model)
    starve(model, num_used)
    return model.eval()


@torch.no_grad()
def logits_of(model: nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """fp32 logits (A, V) that the completion's tokens are drawn from."""
    ids = torch.tensor([prompt + completion])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def assert_greedy(model: nn.Module, prompts: list[list[int]], found: Completions, num_samples: int = 1) -> None:
    for number, ids in enumerate(found.ids):
        logits_AV = logits_of(model, prompts[number // num_samples], ids)
        assert ids == logits_AV.argmax(-1).tolist()
        expected = logits_AV.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(found.log_probs[number]), expected, rtol=0, atol=1e-5)


# --- the model's own tokens


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("family", ["llama", *NUM_MODULES])
def test_greedy_is_the_argmax_of_full_forwards(family, batch_size):
    """Prompts of unlike lengths; with a batch size, prompts join rows that step already, wider and narrower ones."""
    model = tiny_model(family)
    found = generate(model, PROMPTS, GREEDY, num_samples=2, seed=(0,), batch_size=batch_size, turns_between_reads=2)
    assert len(found.ids) == 2 * len(PROMPTS) and len({len(ids) for ids in found.ids}) > 1
    assert_greedy(model, PROMPTS, found, num_samples=2)


@pytest.mark.parametrize("family", ["minimax", "qwen3_next", "exaone_moe"])
def test_a_prompt_that_joins_by_itself_is_not_disturbed_by_its_padding(family):
    """Nothing is padded before: what transformers' masks do with padding in the cache shows only then."""
    model, prompts = tiny_model(family), [PROMPTS[1], PROMPTS[3], PROMPTS[2], PROMPTS[0]]
    first, second = (logits_of(model, prompt, [0]).argmax().item() for prompt in prompts[:2])
    assert first != second
    sampling = Sampling(max_new_tokens=14, temperature=0, stop_ids=(first,))  # one row ends at once, one goes on
    assert_greedy(model, prompts, generate(model, prompts, sampling, seed=(0,), batch_size=2))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_greedy_equals_transformers_generate(family):
    model = adapted(family)
    width = max(LENGTHS)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    stop_ids = (7, 12, 61, 80, 94)
    theirs = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=20, eos_token_id=list(stop_ids), pad_token_id=0
    )
    found = generate(model, PROMPTS, Sampling(max_new_tokens=20, temperature=0, stop_ids=stop_ids), seed=(0,))
    for row, ids_A, finished in zip(theirs[:, width:].tolist(), found.ids, found.finished, strict=True):
        assert ids_A == row[: len(ids_A)] and not any(row[len(ids_A) :])
        assert finished == (ids_A[-1] in stop_ids) and not set(ids_A[:-1]) & set(stop_ids)
    assert any(found.finished)


def filtered(logits_AV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probs after temperature, top-k, top-p, a row at a time."""
    out = []
    for logits_V in logits_AV / sampling.temperature:
        order = logits_V.argsort(descending=True)
        order = order[: sampling.top_k] if sampling.top_k else order
        probs = logits_V[order].softmax(-1)
        before = probs.cumsum(-1) - probs
        kept = order[before < sampling.top_p]
        out.append(torch.full_like(logits_V, -torch.inf).index_put((kept,), logits_V[kept].log_softmax(-1)))
    return torch.stack(out)


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.6}])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_log_probs_are_those_of_the_distribution_drawn_from(family, limits):
    sampling = Sampling(max_new_tokens=8, stop_ids=(5,), **limits)
    model = adapted(family)
    found = generate(model, PROMPTS, sampling, num_samples=3, seed=(1, 2))
    for number, ids in enumerate(found.ids):
        expected_AV = filtered(logits_of(model, PROMPTS[number // 3], ids), sampling)
        expected = expected_AV.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.log_probs[number]), expected, rtol=0, atol=1e-5)
    assert len({tuple(ids) for ids in found.ids}) > len(PROMPTS)


# --- noise


def draw(**kwargs: Any) -> Completions:
    model = kwargs.pop("model", None) or tiny_model("qwen3_moe")
    prompts, sampling = kwargs.pop("prompts", PROMPTS), kwargs.pop("sampling", STOPS)
    return generate(model, prompts, sampling, **{"num_samples": 3, "seed": (4,), **kwargs})


@pytest.mark.parametrize("batch_size", [1, 2, 4, 7])
@pytest.mark.parametrize("turns", [1, 5])
def test_completions_do_not_depend_on_the_batch(batch_size, turns):
    expected, found = draw(), draw(batch_size=batch_size, turns_between_reads=turns)
    assert found.ids == expected.ids and found.finished == expected.finished
    assert {True, False} == set(expected.finished)
    for a, b in zip(found.log_probs, expected.log_probs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_a_prompt_by_itself_under_its_number_draws_the_same():
    expected = draw()
    assert draw(prompts=[PROMPTS[2]], prompt_numbers=[2]).ids == expected.ids[6:9]
    assert draw(prompts=[PROMPTS[2]]).ids != expected.ids[6:9]


def test_other_seeds_draw_other_tokens():
    assert draw(seed=(4,)).ids == draw(seed=(4,)).ids
    assert draw(seed=(4, 1)).ids != draw(seed=(4, 2)).ids


def test_many_prompts_take_more_than_one_forward(monkeypatch):
    expected = draw()
    monkeypatch.setattr(decode_engine, "PREFILL_TOKENS", 10)
    assert draw().ids == expected.ids


# --- the model afterwards


def test_the_model_and_the_random_numbers_are_left_as_they_were():
    model = adapted("mixtral")
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    model(token_batch())
    counts = [m.tokens_per_expert_E.clone() for m in model.modules() if isinstance(m, MoeExperts)]
    state = torch.get_rng_state()
    draw(model=model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    after = [m.tokens_per_expert_E for m in model.modules() if isinstance(m, MoeExperts)]
    assert counts[0].any() and all(torch.equal(a, b) for a, b in zip(counts, after, strict=True))
    model(token_batch(), labels=token_batch()).loss.backward()  # nothing that generation left refuses autograd


# --- ends


def test_padding_may_be_a_stop_id():
    expected = draw(sampling=STOPS)
    assert draw(sampling=STOPS, pad_id=STOPS.stop_ids[1]).ids == expected.ids
    ends = [ids[-1] in STOPS.stop_ids for ids in expected.ids]
    assert ends == expected.finished
    assert all(len(ids) == 12 for ids, finished in zip(expected.ids, ends, strict=True) if not finished)


def test_a_stop_id_at_the_last_token_finishes():
    first = draw(sampling=Sampling(max_new_tokens=1, stop_ids=()))
    found = draw(sampling=Sampling(max_new_tokens=1, stop_ids=(first.ids[0][0],)))
    assert found.finished[0] and not first.finished[0] and found.ids[0] == first.ids[0]


def test_no_end_before_min_new_tokens():
    sampling = Sampling(max_new_tokens=6, min_new_tokens=3, stop_ids=tuple(range(90)))
    found = draw(sampling=sampling, num_samples=8)
    assert all(set(ids[:3]).isdisjoint(range(90)) for ids in found.ids)
    assert min(map(len, found.ids)) == 4 and any(found.finished)
    model = tiny_model("qwen3_moe")
    logits_AV = logits_of(model, PROMPTS[0], found.ids[0])
    logits_AV[:3, :90] = -torch.inf
    expected = logits_AV.log_softmax(-1).gather(1, torch.tensor(found.ids[0])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.log_probs[0]), expected, rtol=0, atol=1e-5)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of "ab"-like pairs, and single bytes of which some make a character only together (tokens 80 to 95)."""
    letters = "abcdefghi"
    words = [first + second for first in letters for second in letters][:80]
    words += [f"<0x{byte:02X}>" for byte in [0xC3, 0xA9, 0xE2, 0x82, 0xAC, *range(0x30, 0x3B)]]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("turns", [1, 5])
def test_stop_strings_end_at_the_token_that_completes_them(turns):
    tokenizer, plain = byte_tokenizer(), Sampling(max_new_tokens=16, stop_ids=())
    whole = draw(sampling=plain)
    text = tokenizer.decode(whole.ids[4])
    strings = (text[7:10], text[20:23], "nowhere")  # from the middle of a token to the middle of another
    found = draw(
        sampling=Sampling(max_new_tokens=16, stop_ids=(), stop_strings=strings),
        tokenizer=tokenizer,
        turns_between_reads=turns,
    )
    assert found.finished[4] and not all(found.finished)
    for ids, log_probs, finished, all_ids in zip(found.ids, found.log_probs, found.finished, whole.ids, strict=True):
        assert len(log_probs) == len(ids) and ids == all_ids[: len(ids)]
        ends = [n for n in range(1, 17) if any(s in tokenizer.decode(all_ids[:n]) for s in strings)]
        assert finished == bool(ends) and len(ids) == (ends[0] if ends else 16)


def scripted_model(script: list[int]) -> nn.Module:
    """A model that says token after token of a script, whatever it is asked."""
    model, tokens = tiny_model("llama"), iter(script)

    def say(module: nn.Module, args: tuple, output: Any) -> Any:
        output.logits = torch.nn.functional.one_hot(torch.tensor([[next(tokens)]]), VOCAB) * 99.0
        return output

    model.register_forward_hook(say)
    return model


@pytest.mark.parametrize(
    "script, strings, min_new, expected",
    [
        ([5, 80, 81, 6, 7, 8], ("é",), 0, 3),  # the bytes of é are two tokens
        ([5, 82, 83, 84, 80, 81], ("€",), 0, 4),
        ([82, 83, 84, 9, 9, 9], ("€b",), 0, 4),  # token 9 is "ba"
        ([0, 0, 0, 0, 5, 5], ("aaa",), 3, 3),  # completed by the third token too
        ([0, 0, 9, 9, 9, 9], ("aaa",), 3, None),  # completed before an end was allowed, and not again
    ],
)
def test_stop_strings_of_scripted_tokens(script, strings, min_new, expected):
    sampling = Sampling(max_new_tokens=6, temperature=0, stop_ids=(), stop_strings=strings, min_new_tokens=min_new)
    found = generate(scripted_model(script), [[3]], sampling, seed=(0,), tokenizer=byte_tokenizer())
    assert found.finished == [expected is not None] and found.ids == [script[: expected or 6]]


# --- refused


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompts=[[3], []]), "prompt 1 is empty"),
        (dict(prompts=[[3] * 53]), r"prompt 0 has 53 tokens.*max_new_tokens=12.*64 positions"),
        (dict(num_samples=0), "num_samples is 0"),
        (dict(batch_size=0), "batch_size is 0"),
        (dict(prompt_numbers=[1]), "prompt_numbers has 1 numbers for 5 prompts"),
        (dict(sampling=Sampling(max_new_tokens=1, stop_ids=(VOCAB,))), f"stop_ids: {VOCAB} is not in"),
        (dict(sampling=Sampling(max_new_tokens=1, stop_ids=(), stop_strings=("x",))), r"\('x',\) need a tokenizer"),
        (dict(model=nn.Linear(2, 2)), "Linear holds no transformers model"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        draw(**change)


@pytest.mark.parametrize(
    "change",
    [
        dict(max_new_tokens=0),
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(top_k=-1),
        dict(min_new_tokens=9),
        dict(stop_strings=("",)),
        dict(stop_ids=(-1,)),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is .*accepted: "):
        Sampling(**{"max_new_tokens": 8, "stop_ids": (), **change})


def test_a_pipeline_stage_is_refused():
    model = tiny_model("llama")
    model.model.layers[1] = PassThrough()
    with pytest.raises(ValueError, match="LlamaForCausalLM is a pipeline stage"):
        draw(model=model)


def test_logits_that_are_not_finite_are_an_error():
    model = tiny_model("llama")
    model.model.embed_tokens.weight.data[PROMPTS[1][4]] = torch.nan
    with pytest.raises(ValueError, match="logits of prompt 1 are not finite at token 1"):
        draw(model=model, prompts=PROMPTS[:2])


def test_no_prompts_are_no_completions():
    assert draw(prompts=[]) == Completions(ids=[], log_probs=[], finished=[])


# --- ranks


def on_ranks(shares: tuple[tuple[int, ...], ...], num_used: int | None, turns: int, batch_size: int | None) -> tuple:
    """(Completions, calls of the model) of this rank's share of the prompts."""
    model = adapted("qwen3_moe", ep_group=dist.group.WORLD, num_used=num_used)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    mine = list(shares[dist.get_rank()])
    found = draw(
        model=model,
        prompts=[PROMPTS[number] for number in mine],
        prompt_numbers=mine,
        group=dist.group.WORLD,
        turns_between_reads=turns,
        batch_size=batch_size,
    )
    return found, len(calls)


@pytest.mark.parametrize("turns", [1, 4])
@pytest.mark.parametrize("num_used", [None, 2])  # 2: the second rank's experts get no token
@pytest.mark.parametrize(
    "shares, batch_size", [(((0, 1, 2, 3, 4), ()), None), (((), (0, 1, 2, 3, 4)), 4), (((3,), (0, 1, 2, 4)), 3)]
)
def test_ep_2_draws_what_one_process_draws(shares, batch_size, num_used, turns):
    expected = draw(model=adapted("qwen3_moe", num_used=num_used))
    answers = pool(2).run(on_ranks, shares, num_used, turns, batch_size)
    assert answers[0][1] == answers[1][1] > 0  # the ranks have called the model equally often
    for share, (found, _) in zip(shares, answers, strict=True):
        rows = [3 * number + sample for number in share for sample in range(3)]
        assert found.ids == [expected.ids[row] for row in rows]
        assert found.finished == [expected.finished[row] for row in rows]
        for row, log_probs in zip(rows, found.log_probs, strict=True):
            assert log_probs == pytest.approx(expected.log_probs[row], abs=1e-5)


def error_on_ranks(make: Callable[[], nn.Module], prompts: list[list[list[int]]]) -> str:
    try:
        draw(model=make(), prompts=prompts[dist.get_rank()], group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "none"


def not_finite_on_rank_1() -> nn.Module:
    model = tiny_model("llama")
    if dist.get_rank() == 1:
        model.lm_head.weight.data[3] = torch.nan
    return model


def small() -> nn.Module:
    return tiny_model("llama")


def test_an_error_of_one_rank_is_raised_on_all():
    answers = pool(2).run(error_on_ranks, small, [PROMPTS, [[]]])
    assert answers == [
        "rank 1: prompt 0 is empty; at least a BOS token is needed",
        "prompt 0 is empty; at least a BOS token is needed",
    ]
    answers = pool(2).run(error_on_ranks, not_finite_on_rank_1, [PROMPTS, PROMPTS[:1]])
    assert "another rank" in answers[0] and "prompt 0 are not finite" in answers[1]


def under_tp() -> Completions:
    model = tiny_model("llama")
    shard_tensor_parallel(model, dist.group.WORLD)
    inject_lora(model, lora_config(["all"]))
    randomise_lora_B(model)
    return draw(model=model.eval())


def test_tp_2_draws_what_one_process_draws():
    expected = draw(model=adapted("llama"))
    for found in pool(2).run(under_tp):
        assert found.ids == expected.ids
