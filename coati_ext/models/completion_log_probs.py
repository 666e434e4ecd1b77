"""Log-probabilities of completions' tokens under the policy, for rollouts and for training alike.

B completions, S tokens, A = S - 1 predicted positions, N tokens of completions, H hidden, V vocabulary.

Only the tokens that the mask names pass the LM head, and their logits never exist together (`linear_log_probs`). Where
the model does more with its logits than multiply by the head's weight, they are computed in full.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from coati_ext.models.log_probs import linear_log_probs, log_probs_and_entropy

_PROBE_TOKENS = 8
# Of log-probabilities: fp32's rounding, and that of 16-bit logits, which the head's products are here spared.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 0.5


class CompletionLogProbs:
    """Callable; holds the model, and how its head is applied.

    Args:
        model: a causal language model, or a wrapper around one; on all ranks that share its experts or matrices. It is
            called once, to prove that its head is a plain one.

    Attributes:
        linear: whether the head is applied to completions' tokens alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
        self.linear = self._has_plain_head() and self._probe()

    def __call__(
        self, sequences_BS: torch.Tensor, action_mask_BA: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            sequences_BS: rows of prompt, completion and any padding, without a gap: no attention mask is needed.
            action_mask_BA: true at position t where token t + 1 is wanted.

        Returns:
            Log-probabilities with gradients and entropies without, (B, A) fp32 (fp64 for an fp64 model); 0 where the
            mask is false.
        """
        mask_BA = action_mask_BA.bool()
        if self.linear:
            log_probs_N, entropy_N = self._of_hidden(sequences_BS, mask_BA, temperature)
        else:
            log_probs_N, entropy_N = self._of_logits(sequences_BS, mask_BA, temperature)
        nothing_BA = log_probs_N.new_zeros(mask_BA.shape)
        return nothing_BA.masked_scatter(mask_BA, log_probs_N), nothing_BA.masked_scatter(mask_BA, entropy_N)

    def _of_hidden(
        self, sequences_BS: torch.Tensor, mask_BA: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_BSH = self._inner.get_decoder()(input_ids=sequences_BS, use_cache=False).last_hidden_state
        head = self._inner.get_output_embeddings()
        return linear_log_probs(
            hidden_BSH[:, :-1][mask_BA],
            head.weight,
            sequences_BS[:, 1:][mask_BA],
            temperature=temperature,
            bias=head.bias,
        )

    def _of_logits(
        self, sequences_BS: torch.Tensor, mask_BA: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BSV = self._model(input_ids=sequences_BS, use_cache=False).logits
        found = log_probs_and_entropy(logits_BSV[:, :-1], sequences_BS[:, 1:], temperature)
        return found[0][mask_BA], found[1][mask_BA]

    def _has_plain_head(self) -> bool:
        """As far as attributes tell: a Linear over the whole vocabulary, and nothing said of its logits."""
        head, config = self._inner.get_output_embeddings(), self._inner.config.get_text_config()
        said = [key for key, value in config.to_dict().items() if "logit" in key and value not in (None, 1, False)]
        return type(head) is nn.Linear and len(head.weight) == config.vocab_size and not said

    @torch.no_grad()
    def _probe(self) -> bool:
        """Whether both ways agree on a few tokens."""
        weight = self._inner.get_output_embeddings().weight
        tokens_BS = torch.arange(_PROBE_TOKENS, device=weight.device)[None] % len(weight)
        mask_BA = torch.ones_like(tokens_BS[:, 1:], dtype=torch.bool)
        by_hidden, _ = self._of_hidden(tokens_BS, mask_BA, 1.0)
        by_logits, _ = self._of_logits(tokens_BS, mask_BA, 1.0)
        tolerance = _TOLERANCE if weight.dtype in (torch.float32, torch.float64) else _TOLERANCE_16_BIT
        return bool((by_hidden - by_logits).abs().max() <= tolerance)


def disable_dropout(model: nn.Module) -> None:
    """No random zeros in training: the policy that is trained is then the one that answered."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "resid_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
