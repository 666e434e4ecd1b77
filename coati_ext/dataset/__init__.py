"""Chat JSONL -> tokens and loss mask, batches, and their order."""

from coati_ext.dataset.collator import ConversationCollator
from coati_ext.dataset.conversation import RawConversationDataset
from coati_ext.dataset.sampler import EpochBatchSampler

__all__ = ["ConversationCollator", "EpochBatchSampler", "RawConversationDataset"]
