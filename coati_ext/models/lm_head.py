"""The LM head of a causal language model, applied apart from the rest, so that the logits of all tokens never exist.

B batch, S sequence, N tokens, H hidden, V vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from coati_ext.models.chunked_softmax import VocabularySlice
from coati_ext.models.log_probs import linear_cross_entropy, linear_log_probs, log_probs_of
from coati_ext.models.loss import GPTLMLoss, num_supervised_tokens
from coati_ext.models.sequence_parallel import sequence_chunk
from coati_ext.models.shard import PassThrough
from coati_ext.models.tensor_parallel_layers import Style, TensorParallelLinear

_PROBE_TOKENS = 8
# Of log-probabilities: fp32's rounding, and that of 16-bit logits, which the head's products are here spared.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 0.5


class LanguageModelHead:
    """Holds the model, and whether its logits are known to follow from its hidden states: their products with the
    head's weight, on this rank or shared by tensor parallelism, and what the config says of scaling and capping them.

    Args:
        model: a causal language model, or a wrapper around one; on all ranks that share its experts or matrices. It is
            called once, to prove that its head is a plain one. May be the last stage of a pipeline.
        sp_group: the ranks that share each row; None without sequence parallelism.

    Attributes:
        is_plain: whether they are; else only the model itself can make its logits.
    """

    def __init__(self, model: nn.Module, sp_group: dist.ProcessGroup | None = None) -> None:
        self.model, self._sp_group = model, sp_group
        self._inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
        self._settings = _logit_settings(self._inner.config.get_text_config())
        self.is_plain = self._looks_plain() and self._probe()

    def hidden(self, **inputs: Any) -> torch.Tensor:
        """(B, S, H): what goes into the head."""
        return self._inner.get_decoder()(**inputs, use_cache=False).last_hidden_state

    def log_probs(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`linear_log_probs` of a plain head."""
        return linear_log_probs(hidden_NH, self._head.weight, targets_N, temperature=temperature, **self._arguments())

    def cross_entropy(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """`linear_cross_entropy` of a plain head."""
        return linear_cross_entropy(hidden_NH, self._head.weight, targets_N, **self._arguments())

    @property
    def _head(self) -> nn.Module:
        return self._inner.get_output_embeddings()

    def _arguments(self) -> dict[str, Any]:
        head, vocabulary = self._head, None
        if isinstance(head, TensorParallelLinear):
            cut = head.tp_cuts["weight"]
            vocabulary = VocabularySlice(group=head.tp_group, start=cut.start, size=cut.full)
        return {"bias": head.bias, "vocabulary": vocabulary, **self._settings}

    def _looks_plain(self) -> bool:
        """As far as attributes tell: a linear over the whole vocabulary, and nothing unknown said of its logits."""
        head, size = self._head, self._inner.config.get_text_config().vocab_size
        if isinstance(head, TensorParallelLinear):
            is_linear = head.style == Style(dim=0, whole=True) and head.full_out == size
        else:
            is_linear = type(head) is nn.Linear and len(head.weight) == size
        return is_linear and self._settings is not None

    @torch.no_grad()
    def _probe(self) -> bool:
        """Whether both ways agree on a few tokens."""
        inputs = self._probe_inputs()
        hidden_NH = self.hidden(**inputs).flatten(0, 1)
        logits_NV = self._inner(**inputs, use_cache=False).logits.flatten(0, 1)
        targets_N = torch.arange(len(hidden_NH), device=hidden_NH.device) % logits_NV.shape[1]
        by_hidden_N, _ = self.log_probs(hidden_NH, targets_N)
        by_logits_N = log_probs_of(logits_NV, targets_N)
        tolerance = _TOLERANCE if hidden_NH.dtype in (torch.float32, torch.float64) else _TOLERANCE_16_BIT
        return bool((by_hidden_N - by_logits_N).abs().max() <= tolerance)

    def _probe_inputs(self) -> dict[str, torch.Tensor]:
        """A row of tokens, or this rank's part of it, or hidden states where an earlier stage has the embedding."""
        weight_VH = self._head.weight
        size = 1 if self._sp_group is None else dist.get_world_size(self._sp_group)
        tokens_BS = torch.arange(size * _PROBE_TOKENS, device=weight_VH.device)[None] % len(weight_VH)
        inputs = {"input_ids": tokens_BS}
        if size > 1:
            inputs = sequence_chunk(inputs, dist.get_rank(self._sp_group), size)
        if isinstance(self._inner.get_input_embeddings(), PassThrough):
            shape = (*inputs.pop("input_ids").shape, weight_VH.shape[1])
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            inputs["inputs_embeds"] = noise.to(weight_VH)
        return inputs


def _logit_settings(config: PreTrainedConfig) -> dict[str, float | None] | None:
    """Arguments of `linear_log_probs` from what the config says of logits; None if it says more than is known."""
    said = {key: value for key, value in config.to_dict().items() if "logit" in key and value not in (None, 1, False)}
    for of_attention_or_router in ("attn_logit_softcapping", "output_router_logits"):
        said.pop(of_attention_or_router, None)
    settings = {}
    if "final_logit_softcapping" in said:  # of Gemma
        settings["logit_softcap"] = said.pop("final_logit_softcapping")
    if "logit_scale" in said:  # of Cohere
        settings["logit_scale"] = said.pop("logit_scale")
    elif "logits_scaling" in said:  # of Granite, which divides
        settings["logit_scale"] = 1 / said.pop("logits_scaling")
    return None if said else settings


class LanguageModelLoss:
    """`GPTLMLoss` of a model: only supervised tokens pass a plain head, some at a time."""

    def __init__(self, head: LanguageModelHead) -> None:
        self._head = head
        self._of_logits = GPTLMLoss()

    def __call__(
        self,
        inputs: dict[str, torch.Tensor],
        labels_BS: torch.Tensor,
        num_tokens: torch.Tensor | float | None = None,
        *,
        shifted: bool = False,
    ) -> torch.Tensor:
        """Arguments of the model; the others as in `GPTLMLoss`."""
        if not self._head.is_plain:
            return self._of_logits(self._head.model(**inputs).logits, labels_BS, num_tokens, shifted=shifted)
        return self.of_hidden(self._head.hidden(**inputs), labels_BS, num_tokens, shifted=shifted)

    def of_hidden(
        self,
        hidden_BSH: torch.Tensor,
        labels_BS: torch.Tensor,
        num_tokens: torch.Tensor | float | None = None,
        *,
        shifted: bool = False,
    ) -> torch.Tensor:
        """The same from what goes into a plain head."""
        predicting_BSH, targets_BS = (hidden_BSH, labels_BS) if shifted else (hidden_BSH[:, :-1], labels_BS[:, 1:])
        total = self._head.cross_entropy(predicting_BSH.reshape(-1, hidden_BSH.shape[-1]), targets_BS.reshape(-1))
        if num_tokens is None:
            num_tokens = num_supervised_tokens(labels_BS, shifted=shifted).clamp(min=1)
        return total / num_tokens
