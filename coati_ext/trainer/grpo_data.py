"""What a GRPO run reads: its template, prompts, held-out prompts and conversations."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.utils.data import ConcatDataset
from transformers import GenerationConfig, PreTrainedTokenizerBase

from coati_ext.dataset import ConversationCollator, RawConversationDataset
from coati_ext.dataset.conversation_template import ConversationTemplate, read_conversation_template, template_of
from coati_ext.dataset.prompt_loader import PromptLoader
from coati_ext.dataset.prompts import RawPromptDataset
from coati_ext.grpo_config import GRPOConfig
from coati_ext.trainer.language_model_batches import LanguageModelBatches
from coati_ext.trainer.setup import check_vocabulary
from coati_ext.utils.launch import print_rank_0
from coati_ext.utils.model_config import read_model_config, text_config_of

if TYPE_CHECKING:
    from colossalai.booster.plugin import MoeHybridParallelPlugin


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run reads."""

    template: ConversationTemplate
    prompts: PromptLoader
    held_out: ConcatDataset | None
    language_model_batches: LanguageModelBatches | None


def load_data(config: GRPOConfig, plugin: "MoeHybridParallelPlugin", tokenizer: PreTrainedTokenizerBase) -> Data:
    """Prompts, held-out prompts and conversations, with their counts and the first prompt shown once.

    Raises:
        ValueError, OSError: a broken line, a template of another model, no usable prompt, or fewer than a collection.
    """
    template = read_template(config, tokenizer)
    _check_positions(config)
    prompts = _load_prompts(config, tokenizer, template, "--prompt_dataset", config.data.prompt_dataset)
    held_out = _load_prompts(config, tokenizer, template, "--eval_dataset", config.data.eval_dataset)
    shares = {"dp_rank": dist.get_rank(plugin.dp_group), "dp_size": dist.get_world_size(plugin.dp_group)}
    try:
        loader = PromptLoader(prompts, config.rollout.experience_batch_size, **shares, seed=config.train.seed)
    except ValueError as error:
        raise ValueError(f"--prompt_dataset and --experience_batch_size: {error}") from None
    ptx = None
    if config.data.ptx_dataset:
        conversations = ConcatDataset([_load_conversations(config, tokenizer, f) for f in config.data.ptx_dataset])
        collate = ConversationCollator(tokenizer)
        size = config.data.ptx_batch_size
        ptx = LanguageModelBatches(conversations, collate, size, **shares, seed=config.train.seed)
    return Data(
        template=template,
        prompts=loader,
        held_out=ConcatDataset(held_out) if held_out else None,
        language_model_batches=ptx,
    )


def read_template(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> ConversationTemplate:
    """That of --conversation_template_config, or the model's own."""
    file = config.data.conversation_template_config
    if file is not None:
        return read_conversation_template(file, tokenizer)
    try:
        generation = GenerationConfig.from_pretrained(config.pretrained, local_files_only=True)
    except OSError:
        generation = None  # the model brings none
    return template_of(tokenizer, generation)


def _check_positions(config: GRPOConfig) -> None:
    most = text_config_of(read_model_config(config.pretrained)).get("max_position_embeddings")
    if most is not None and config.data.max_length > most:
        raise ValueError(
            f"--max_length {config.data.max_length} is more than the model's {most} positions "
            "(max_position_embeddings in config.json)"
        )


def _load_prompts(
    config: GRPOConfig, tokenizer: PreTrainedTokenizerBase, template: ConversationTemplate, flag: str, files: list[str]
) -> list[RawPromptDataset]:
    datasets = []
    for file in files:
        dataset = RawPromptDataset(
            tokenizer,
            file,
            config.data.max_prompt_length,
            template=template,
            require_gold=bool(config.reward.reward_functions),
            skip_bad_lines=config.data.skip_bad_lines,
            template_kwargs=config.data.template_kwargs(),
            show_progress=dist.get_rank() == 0,
        )
        check_vocabulary(config.pretrained, dataset.max_token_id())
        print_rank_0(f"{flag} {dataset.summary()}")
        datasets.append(dataset)
    if datasets and flag == "--prompt_dataset":
        print_rank_0("first prompt, as the model meets it:", datasets[0].show_sample(0))
    return datasets


def _load_conversations(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase, file: str) -> RawConversationDataset:
    dataset = RawConversationDataset(
        tokenizer,
        file,
        config.data.max_length,
        skip_bad_lines=config.data.skip_bad_lines,
        show_progress=dist.get_rank() == 0,
    )
    check_vocabulary(config.pretrained, dataset.max_token_id())
    print_rank_0(f"--ptx_dataset {dataset.summary()}")
    return dataset
