"""Ratios of token probabilities, and weights for samples that another policy drew. B sequences, A actions (tokens).

A rollout engine runs other kernels, in another precision, and routes some tokens to other experts. Its probabilities
are not those of the policy that it was given, and the ratio between the two says by how much.
"""

import torch

from coati_ext.utils.metric_sums import Max, Mean, Metric

# exp of more would soon overflow in fp32, and an infinity that is clipped away still gives NaN for a gradient.
MAX_LOG_RATIO = 20.0

IMPORTANCE_KINDS = ("none", "token_truncate", "token_mask", "sequence_mask", "geometric_mask")


def check_importance(kind: str, cap: float) -> None:
    """
    Raises:
        ValueError: unknown kind, or a cap that is not above 1.
    """
    if kind not in IMPORTANCE_KINDS:
        raise ValueError(f"unknown importance correction {kind!r}; known are {', '.join(IMPORTANCE_KINDS)}")
    if not cap > 1:
        raise ValueError(f"the cap of importance weights must be above 1, got {cap}")


@torch.no_grad()
def importance_weights(
    old_log_probs_BA: torch.Tensor, sampler_log_probs_BA: torch.Tensor, mask_BA: torch.Tensor, kind: str, cap: float
) -> torch.Tensor:
    """What to multiply the loss of each token by, from w = old policy / sampler; without a gradient.

    Args:
        kind: none: 1. token_truncate: min(w, cap). token_mask: w, but 0 outside [1 / cap, cap]. sequence_mask: 1, but 0
            for all tokens of a sequence whose product of w is outside; geometric_mask: whose geometric mean is. What
            is dropped still counts in the denominators.
        cap: above 1.

    Returns:
        (B, A); anything finite where the mask is false.

    Raises:
        ValueError: as `check_importance`.

    Example:
        >>> log_w = torch.tensor([[0.0, 5.0, -5.0]])
        >>> mask = torch.ones(1, 3, dtype=torch.bool)
        >>> importance_weights(log_w, torch.zeros(1, 3), mask, "token_mask", 2.0).tolist()
        [[1.0, 0.0, 0.0]]
    """
    check_importance(kind, cap)
    log_w_BA = log_ratio(old_log_probs_BA, sampler_log_probs_BA, mask_BA)
    if kind == "none":
        return torch.ones_like(log_w_BA)
    w_BA = log_w_BA.exp()
    if kind == "token_truncate":
        return w_BA.clamp(max=cap)
    if kind == "token_mask":
        return w_BA.where(_within(w_BA, cap), 0)
    of_sequence_B1 = sequence_mean(log_w_BA, mask_BA) if kind == "geometric_mask" else log_w_BA.sum(-1, keepdim=True)
    return _within(of_sequence_B1.exp(), cap).expand_as(w_BA).to(w_BA.dtype)


@torch.no_grad()
def mismatch_metrics(
    old_log_probs_BA: torch.Tensor, sampler_log_probs_BA: torch.Tensor, mask_BA: torch.Tensor
) -> dict[str, Metric]:
    """mismatch_kl, the k3 estimate of KL(sampler || old policy) from tokens of the sampler, and the largest of them."""
    log_w_BA = log_ratio(old_log_probs_BA, sampler_log_probs_BA, mask_BA)
    k3_BA = torch.expm1(log_w_BA) - log_w_BA
    return {"mismatch_kl": masked_mean(k3_BA, mask_BA), "mismatch_kl_max": masked_max(k3_BA, mask_BA)}


def log_ratio(log_probs_BA: torch.Tensor, other_log_probs_BA: torch.Tensor, mask_BA: torch.Tensor) -> torch.Tensor:
    """log probability / other, at most `MAX_LOG_RATIO` either way; 0, with no gradient, where the mask is false."""
    difference_BA = log_probs_BA.where(mask_BA, 0) - other_log_probs_BA.where(mask_BA, 0)
    return difference_BA.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(x_BA: torch.Tensor, mask_BA: torch.Tensor) -> torch.Tensor:
    """(B, 1), over the tokens in the mask; 0 for a sequence without."""
    return x_BA.where(mask_BA, 0).sum(-1, keepdim=True) / mask_BA.sum(-1, keepdim=True).clamp(min=1)


def masked_mean(x_BA: torch.Tensor, mask_BA: torch.Tensor) -> Mean:
    return Mean(x_BA.detach().where(mask_BA, 0).sum(), mask_BA.sum())


def masked_max(x_BA: torch.Tensor, mask_BA: torch.Tensor) -> Max:
    nothing = x_BA.new_full((1,), -torch.inf)
    return Max(torch.cat([x_BA.detach().where(mask_BA, -torch.inf).flatten(), nothing]).amax())


def _within(w: torch.Tensor, cap: float) -> torch.Tensor:
    return (w >= 1 / cap) & (w <= cap)
