"""A tiny GRPO run on this rank of a pool: tokens are words, and a completion's text alone decides its reward."""

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity import lora_config, randomise_lora_B
from tiny_models import VOCAB, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

STOP_IDS = tuple(range(0, VOCAB, 8))  # a random completion ends after 8 tokens in the mean
MAX_NEW_TOKENS = 10


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, w0 to w95; a prompt is its words and w4."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w2", pad_token="w2")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'w4' }}{% endif %}"
    )
    return tokenizer


def write_prompts(folder: Path, golds: list[Any]) -> str:
    """A file of one prompt for each gold, of 1 to 6 random words."""
    chance, file = random.Random(3), Path(folder) / "prompts.jsonl"
    lines = []
    for gold in golds:
        words = [f"w{chance.randrange(5, VOCAB)}" for _ in range(chance.randint(1, 6))]
        lines.append({"messages": [{"role": "user", "content": " ".join(words)}], "gt_answer": gold})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def hashed(completion: str, gold: Any) -> int:
    """0, 1 or 2, at random."""
    return zlib.crc32(completion.encode()) % 3


@dataclass
class Layout:
    """Of the processes of a pool."""

    ep: int = 1
    tp: int = 1
    zero_stage: int = 1


@dataclass
class Boosted:
    """What `Booster` gives, and the model inside."""

    plugin: Any
    booster: Any
    inner: nn.Module
    model: nn.Module
    optimizer: Any
    lr_scheduler: Any


def boost(
    family: str,
    layout: Layout | None = None,
    *,
    lr: float = 0.1,
    adam: bool = False,
    random_adapter: bool = True,
    change: Callable[[nn.Module], None] = lambda model: None,
    schedule: Callable[[int], float] = lambda step: 1.0,
) -> Boosted:
    """A tiny model with an adapter under MoeLoraPlugin, in fp32 and without clipping.

    Args:
        random_adapter: else lora_B is zero, and the policy is the base model.
        change: made to the model before it is boosted.
        schedule: of the learning rate, by optimizer step.
    """
    from coati_ext import compat

    compat.apply()  # before Booster is imported
    from colossalai.booster import Booster

    from coati_ext.plugin import MoeLoraPlugin

    layout = layout or Layout()
    plugin = MoeLoraPlugin(
        ep_size=layout.ep, tp_size=layout.tp, zero_stage=layout.zero_stage, precision="fp32", max_norm=0.0
    )
    booster = Booster(plugin=plugin)
    inner = booster.enable_lora(tiny_model(family), lora_config=lora_config(["all"]))
    if random_adapter:
        randomise_lora_B(inner)
    change(inner)
    trained = [p for p in inner.parameters() if p.requires_grad]
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(trained, lr=lr)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model, optimizer, *_ = booster.boost(inner, optimizer, lr_scheduler=lr_scheduler)
    return Boosted(plugin, booster, inner, model, optimizer, lr_scheduler)


class Metrics:
    """A logger that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, scalars: dict[str, float], **extra: Any) -> None:
        self.rows.append({"step": step, **scalars})


def make_trainer(
    boosted: Boosted,
    reward: Callable[..., Any] | None = hashed,
    *,
    prompts: str | None = None,
    num_prompts: int = 4,
    plan: tuple[int, int, int] = (1, 1, 1),
    language_model_batches: Any = None,
    **settings: Any,
):
    """A `GRPOTrainer` with its plan made.

    Args:
        prompts: file of `write_prompts`; None: `train_step` is all that will be called, and prompts are never drawn.
        num_prompts: of this rank in a collection; the trainer has their loader as `loader`.
        plan: episodes, collections and passes.
        settings: others of `GRPOTrainer`.
    """
    from coati_ext.dataset.prompt_loader import PromptLoader
    from coati_ext.dataset.prompts import RawPromptDataset
    from coati_ext.models.reward import RLVRRewardModel
    from coati_ext.trainer.grpo import GRPOTrainer

    tokenizer = word_tokenizer()
    defaults = {
        "num_generations": 4,
        "train_batch_size": 4,
        "temperature": 1.0,
        "max_new_tokens": MAX_NEW_TOKENS,
        "stop_token_ids": list(STOP_IDS),
        "seed": 7,
    }
    trainer = GRPOTrainer(
        boosted.booster,
        boosted.model,
        RLVRRewardModel([reward]),
        None,
        boosted.optimizer,
        boosted.lr_scheduler,
        tokenizer,
        **{**defaults, **settings},
    )
    dp_group = boosted.plugin.dp_group
    shares = {"dp_rank": dist.get_rank(dp_group), "dp_size": dist.get_world_size(dp_group), "seed": 7}
    loader = _NoPrompts(num_prompts)
    if prompts is not None:
        loader = PromptLoader([RawPromptDataset(tokenizer, prompts, 40)], num_prompts, **shares)
    trainer.prepare(*plan, loader, language_model_batches)
    trainer.loader, trainer.plan_of_fit = loader, (*plan, loader, language_model_batches)  # for `fit` below
    return trainer


def fit(trainer, **kwargs: Any) -> list[dict[str, float]]:
    """The metrics of each episode."""
    logger = Metrics()
    trainer.fit(*trainer.plan_of_fit, logger, show_progress=False, **kwargs)
    return logger.rows


class _NoPrompts:
    """Says how many prompts a collection has, and has none."""

    def __init__(self, num_prompts: int) -> None:
        self.sampler = self
        self.num_prompts = num_prompts


def adapter_of(inner: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of what is trained, of this rank."""
    return {name: p.detach().clone() for name, p in inner.named_parameters() if p.requires_grad}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)
