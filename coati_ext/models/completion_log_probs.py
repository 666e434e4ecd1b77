"""Log-probabilities of completions' tokens under the policy, for rollouts and for training alike.

B completions, S tokens, A = S - 1 predicted positions, N tokens of completions, H hidden, V vocabulary.

Only the tokens that the mask names pass the LM head, and their logits never exist together (`linear_log_probs`). Where
the model does more with its logits than `LanguageModelHead` knows of, they are computed in full.
"""

import torch
from torch import nn

from coati_ext.models.lm_head import LanguageModelHead
from coati_ext.models.log_probs import log_probs_and_entropy


class CompletionLogProbs:
    """Callable; holds the model, and how its head is applied.

    Args:
        model: a causal language model, or a wrapper around one; on all ranks that share its experts or matrices. It is
            called once, to prove that its head is a plain one.

    Attributes:
        head: of the model.
        linear: whether it is applied to completions' tokens alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.head = LanguageModelHead(model)
        self.linear = self.head.is_plain

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
        hidden_BSH = self.head.hidden(input_ids=sequences_BS)
        return self.head.log_probs(hidden_BSH[:, :-1][mask_BA], sequences_BS[:, 1:][mask_BA], temperature)

    def _of_logits(
        self, sequences_BS: torch.Tensor, mask_BA: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BSV = self.head.model(input_ids=sequences_BS, use_cache=False).logits
        found = log_probs_and_entropy(logits_BSV[:, :-1], sequences_BS[:, 1:], temperature)
        return found[0][mask_BA], found[1][mask_BA]


def disable_dropout(model: nn.Module) -> None:
    """No random zeros in training: the policy that is trained is then the one that answered."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "resid_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
