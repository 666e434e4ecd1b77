"""Chat and prompt JSONL -> tokens, loss masks and golds; batches, and their order."""

from coati_ext.dataset.collator import ConversationCollator
from coati_ext.dataset.conversation import RawConversationDataset
from coati_ext.dataset.prompt_loader import PromptLoader
from coati_ext.dataset.prompt_sampler import PromptSampler
from coati_ext.dataset.prompts import RawPromptDataset
from coati_ext.dataset.sampler import EpochBatchSampler

__all__ = [
    "ConversationCollator",
    "EpochBatchSampler",
    "PromptLoader",
    "PromptSampler",
    "RawConversationDataset",
    "RawPromptDataset",
]
