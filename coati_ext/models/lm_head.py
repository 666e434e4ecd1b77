"""The LM head of a causal language model, applied apart from the rest, so that the logits of all tokens never exist.

B batch, S sequence, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from coati_ext.models.log_probs import linear_cross_entropy, linear_log_probs, log_probs_of
from coati_ext.models.loss import GPTLMLoss, num_supervised_tokens

_PROBE_TOKENS = 8
# Of log-probabilities: fp32's rounding, and that of 16-bit logits, which the head's products are here spared.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 0.5


class LanguageModelHead:
    """Holds the model, and whether its logits are its hidden states times the head's weight, and nothing more.

    Args:
        model: a causal language model, or a wrapper around one; on all ranks that share its experts or matrices. It is
            called once, to prove that its head is a plain one.

    Attributes:
        is_plain: whether it is; else only the model itself can make its logits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
        self.is_plain = self._looks_plain() and self._probe()

    def hidden(self, **inputs: Any) -> torch.Tensor:
        """(B, S, H): what goes into the head."""
        return self._inner.get_decoder()(**inputs, use_cache=False).last_hidden_state

    @property
    def weight_VH(self) -> torch.Tensor:
        return self._inner.get_output_embeddings().weight

    @property
    def bias_V(self) -> torch.Tensor | None:
        return self._inner.get_output_embeddings().bias

    def _looks_plain(self) -> bool:
        """As far as attributes tell: a Linear over the whole vocabulary, and nothing said of its logits."""
        head, config = self._inner.get_output_embeddings(), self._inner.config.get_text_config()
        said = [key for key, value in config.to_dict().items() if "logit" in key and value not in (None, 1, False)]
        return type(head) is nn.Linear and len(head.weight) == config.vocab_size and not said

    @torch.no_grad()
    def _probe(self) -> bool:
        """Whether both ways agree on a few tokens."""
        weight_VH = self.weight_VH
        tokens_BS = torch.arange(_PROBE_TOKENS, device=weight_VH.device)[None] % len(weight_VH)
        targets_N = tokens_BS[0, 1:]
        hidden_NH = self.hidden(input_ids=tokens_BS)[0, :-1]
        by_hidden_N, _ = linear_log_probs(hidden_NH, weight_VH, targets_N, bias=self.bias_V)
        logits_NV = self.model(input_ids=tokens_BS, use_cache=False).logits[0, :-1]
        by_logits_N = log_probs_of(logits_NV, targets_N)
        tolerance = _TOLERANCE if weight_VH.dtype in (torch.float32, torch.float64) else _TOLERANCE_16_BIT
        return bool((by_hidden_N - by_logits_N).abs().max() <= tolerance)


class LanguageModelLoss:
    """`GPTLMLoss` of a model: only supervised tokens pass a plain head, some at a time."""

    def __init__(self, head: LanguageModelHead) -> None:
        self._head = head
        self._of_logits = GPTLMLoss()

    def __call__(
        self, inputs: dict[str, torch.Tensor], labels_BS: torch.Tensor, num_tokens: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """Arguments of the model, and labels as data sets have them; `num_tokens` as in `GPTLMLoss`."""
        if not self._head.is_plain:
            return self._of_logits(self._head.model(**inputs).logits, labels_BS, num_tokens)
        hidden_BSH = self._head.hidden(**inputs)
        total = linear_cross_entropy(
            hidden_BSH[:, :-1].reshape(-1, hidden_BSH.shape[-1]),
            self._head.weight_VH,
            labels_BS[:, 1:].reshape(-1),
            bias=self._head.bias_V,
        )
        if num_tokens is None:
            num_tokens = num_supervised_tokens(labels_BS).clamp(min=1)
        return total / num_tokens
