"""One optimizer step of GRPO gives the per-tensor gradients of one process that sees all completions at once (fp32).

The reference has no plugin, no micro-batch and no chunk: full logits of all rows, one backward. AdamW would hide a
constant factor in a gradient; these tests compare gradients. B completions, S tokens, A = S - 1 predicted positions.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import pool
from parity import collate, lora_config, randomise_lora_B, samples, starve, whole_gradients
from tiny_grpo import Layout, boost, make_trainer
from tiny_models import VOCAB, tiny_model

from coati_ext.experience_buffer import Experience
from coati_ext.models.aggregation import Denominators
from coati_ext.models.lora import adapters_disabled, inject_lora
from coati_ext.models.loss import GPTLMLoss
from coati_ext.models.policy_loss import LOSSES, PolicyLoss

TOLERANCE = 2e-5  # relative, in fp32: only the order of summation differs
TEMPERATURE = 0.7
MAX_LENGTH = 9
# Prompt and completion of each row. Rows 1 and 5 are not in the loss: all that rank 1 of four has.
LENGTHS = [(3, 4), (1, 6), (5, 1), (2, 9), (4, 7), (2, 2), (6, 3), (1, 8)]
NOT_IN_LOSS = (1, 5)
ADVANTAGES = [0.9, 0.0, -1.2, 0.4, 0.0, 0.0, -0.3, 1.1]

LAYOUTS = {  # name: (processes, layout, rows of each micro-batch of a rank, other settings of `step_of`)
    "one batch": (1, Layout(), [8], {}),
    "single rows": (1, Layout(), [1] * 8, {}),
    "uneven micro-batches": (1, Layout(), [5, 3], {}),
    "another order and more padding": (1, Layout(), [3, 3, 2], {"order": [6, 1, 4, 7, 0, 5, 3, 2], "padding": 6}),
    "dp 2": (2, Layout(), [4], {}),
    "dp 2, ZeRO 0, micro-batches": (2, Layout(zero_stage=0), [3, 1], {}),
    "dp 2, ZeRO 2, micro-batches": (2, Layout(zero_stage=2), [1, 3], {}),
    "dp 4, a rank without a token": (4, Layout(), [1, 1], {}),
    "dp 4, ZeRO 2": (4, Layout(zero_stage=2), [2], {}),
    "ep 2": (2, Layout(ep=2), [4], {}),
    "ep 2, ZeRO 0": (2, Layout(ep=2, zero_stage=0), [2, 2], {"padding": 3}),
    "ep 2, ZeRO 2, micro-batches": (2, Layout(ep=2, zero_stage=2), [1, 3], {}),
    "ep 2 x dp 2": (4, Layout(ep=2), [1, 1], {}),
}


def policy(family: str, num_used: int | None):
    """What every layout starts from, on one process."""
    model = tiny_model(family)
    inject_lora(model, lora_config(["all"]), seed=0)
    randomise_lora_B(model)
    starve(model, num_used)
    return model


def log_probs_of(model, sequences_BS: torch.Tensor) -> torch.Tensor:
    logits_BSV = model(input_ids=sequences_BS).logits / TEMPERATURE
    return logits_BSV[:, :-1].log_softmax(-1).gather(-1, sequences_BS[:, 1:, None])[..., 0]


@torch.no_grad()
def experience_of(model) -> Experience:
    """Rows whose old and sampler's log-probabilities are some way from the model's: ratios clip on both sides."""
    noise = torch.Generator().manual_seed(2)
    num, length = len(LENGTHS), max(map(sum, LENGTHS))
    sequences_BS = torch.randint(3, VOCAB, (num, length), generator=noise)
    position_A = torch.arange(length - 1)
    prompt_B1 = torch.tensor([[prompt] for prompt, _ in LENGTHS])
    end_B1 = torch.tensor([[prompt + completion] for prompt, completion in LENGTHS])
    attention_BS = torch.arange(length) < end_B1
    action_BA = (position_A >= prompt_B1 - 1) & (position_A < end_B1 - 1)
    action_BA[list(NOT_IN_LOSS)] = False
    log_probs_BA = log_probs_of(model, sequences_BS)
    with adapters_disabled(model):
        reference_BA = log_probs_of(model, sequences_BS)
    near = lambda scale: log_probs_BA + scale * torch.randn(log_probs_BA.shape, generator=noise)  # noqa: E731
    return Experience(
        sequences=sequences_BS.masked_fill(~attention_BS, 0),
        attention_mask=attention_BS,
        action_mask=action_BA,
        action_log_probs=near(0.3),
        sampler_log_probs=near(0.6),
        reference_log_probs=reference_BA,
        reward=torch.zeros(num),
        advantages=torch.tensor(ADVANTAGES),
    )


def reference(family: str, settings: dict, num_used: int | None = None):
    """(Experience, loss, gradients) of one process."""
    model = policy(family, num_used)
    settings, ptx_coef = dict(settings), settings.get("ptx_coef", 0.0)
    settings.pop("ptx_coef", None)
    experience = experience_of(model)
    on_policy = settings.pop("on_policy", False)
    loss, _ = PolicyLoss(max_length=MAX_LENGTH, **settings)(
        log_probs_of(model, experience.sequences),
        None if on_policy else experience.action_log_probs,
        experience.advantages,
        experience.action_mask,
        denominators=Denominators.of([experience.action_mask]),
        ref_log_probs_BA=experience.reference_log_probs,
        sampler_log_probs_BA=experience.sampler_log_probs,
    )
    if ptx_coef:
        batch = collate(samples())
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = (1 - ptx_coef) * loss + ptx_coef * GPTLMLoss()(logits, batch["labels"])
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    return experience, loss.item(), gradients


def step_of(
    family: str,
    layout: Layout,
    sizes: list[int],
    experience: Experience,
    settings: dict,
    num_used: int | None,
    order: list[int] | None = None,
    padding: int = 0,
):
    """(loss, gradient norm, gradients) of the same through `GRPOTrainer.train_step`, on this rank of the pool."""
    settings = dict(settings)
    on_policy = settings.pop("on_policy", False)
    boosted = boost(family, layout, lr=1e-12, change=lambda model: starve(model, num_used))
    trainer = make_trainer(
        boosted,
        temperature=TEMPERATURE,
        max_new_tokens=MAX_LENGTH,
        language_model_batches=object() if settings.get("ptx_coef") else None,
        **{"importance": "none", **settings},
    )
    trainer.step = 1 if on_policy else 0  # the first step of the update has no old policy but itself
    gradients, upstream_step = {}, boosted.optimizer.step

    def recording_step() -> None:
        found = whole_gradients(boosted.inner, boosted.optimizer, boosted.plugin.pp_group, boosted.plugin.tp_group)
        gradients.update(found)
        upstream_step()

    boosted.optimizer.step = recording_step
    dp_rank, dp_size = dist.get_rank(trainer.dp_group), dist.get_world_size(trainer.dp_group)
    mine = torch.tensor((order or list(range(len(experience))))[dp_rank::dp_size])
    micro_batches = [padded(experience.take(index), padding) for index in mine.split(sizes)]
    conversations = [collate(samples()[dp_rank::dp_size])] if settings.get("ptx_coef") else []
    result = trainer.train_step(micro_batches, conversations)
    return result.loss, result.grad_norm, gradients


def padded(batch: Experience, columns: int) -> Experience:
    pad = {name: t if t.dim() == 1 else F.pad(t, (0, columns)) for name, t in batch.tensors().items()}
    return dataclasses.replace(batch, **pad)


_references: dict = {}


def assert_same_step(processes: int, family: str, layout: Layout, sizes: list[int], settings: dict, **kwargs) -> None:
    num_used = kwargs.pop("num_used", None)
    key = (family, num_used, *settings.items())
    if key not in _references:
        _references[key] = reference(family, settings, num_used)
    experience, loss, expected = _references[key]
    arguments = (family, layout, sizes, experience, settings, num_used, kwargs.get("order"), kwargs.get("padding", 0))
    norm = torch.cat([g.flatten() for g in expected.values()]).norm().item()
    for ours, grad_norm, gradients in pool(processes).run(step_of, *arguments):
        assert ours == pytest.approx(loss, rel=TOLERANCE, abs=1e-6)
        assert grad_norm == pytest.approx(norm, rel=TOLERANCE)
        assert gradients.keys() == expected.keys()
        for name, exact in expected.items():
            error = (gradients[name] - exact).norm() / exact.norm().clamp(min=1e-6 * norm)
            assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_used", [None, 2], ids=["all experts", "two experts without a token"])
def test_no_layout_changes_a_gradient(name, num_used):
    processes, layout, sizes, others = LAYOUTS[name]
    settings = {"kl_coef": 0.2, "importance": "token_truncate"}
    assert_same_step(processes, "mixtral", layout, sizes, settings, num_used=num_used, **others)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("on_policy", [False, True], ids=["old log-probabilities", "first step"])
def test_every_loss_is_the_same_in_parts(loss, on_policy):
    settings = {"loss": loss, "kl_coef": 0.1, "kl_kind": "k2", "on_policy": on_policy}
    assert_same_step(2, "mixtral", Layout(ep=2), [1, 3], settings)


@pytest.mark.parametrize(("importance", "cap"), [("token_mask", 1.6), ("sequence_mask", 8.0), ("geometric_mask", 1.3)])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_corrections_are_the_same_in_parts(importance, cap, aggregation):
    settings = {"importance": importance, "aggregation": aggregation, "importance_cap": cap}
    assert_same_step(2, "mixtral", Layout(), [2, 2], settings)


@pytest.mark.parametrize(("processes", "sizes"), [(1, [8]), (1, [3, 5]), (2, [1, 3]), (4, [2])])
def test_a_language_model_loss_beside_it_is_the_same_in_parts(processes, sizes):
    settings = {"ptx_coef": 0.3, "kl_coef": 0.1}
    assert_same_step(processes, "mixtral", Layout(ep=min(2, processes)), sizes, settings)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("processes", [2, 4])
def test_tensor_parallelism_is_the_same(processes, zero_stage):
    sizes = [5, 3] if processes == 2 else [1, 3]
    assert_same_step(processes, "llama", Layout(tp=2, zero_stage=zero_stage), sizes, {"kl_coef": 0.2})


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_other_families_are_the_same_under_expert_parallelism(family):
    assert_same_step(2, family, Layout(ep=2), [3, 1], {"kl_coef": 0.2})
