"""Losses of GRPO and its relatives. B sequences, A actions (completion tokens).

What differs between the algorithms is a function of one token or sequence and a row of `LOSSES`; the sum over tokens,
the KL term and the correction for the sampler are shared. Positions where the mask is false may hold anything.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from coati_ext.models.aggregation import Denominators, aggregate, check_aggregation
from coati_ext.models.importance import (
    MAX_LOG_RATIO,
    check_importance,
    importance_weights,
    log_ratio,
    masked_max,
    masked_mean,
    mismatch_metrics,
    sequence_mean,
)
from coati_ext.utils.metric_sums import Metric, Sum


class Clip(NamedTuple):
    """The ratio stays between 1 - eps_low and 1 + eps_high; `dual` caps the loss of bad tokens that became likelier."""

    eps_low: float | None
    eps_high: float | None
    dual: float | None = None


class LossKind(NamedTuple):
    """One algorithm: its loss of a token, and what goes with it unless told otherwise.

    No clip bound means that the loss has none.
    """

    function: Callable[..., tuple[torch.Tensor, dict[str, Metric]]]
    aggregation: str
    advantage: str
    clip_eps_low: float | None
    clip_eps_high: float | None


def token_ratio_loss(
    log_probs_BA: torch.Tensor,
    old_log_probs_BA: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BA: torch.Tensor,
    clip: Clip,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Clipped ratio of each token: PPO's surrogate with the advantage of the whole completion.

    Returns:
        The loss of each token (B, A), to be aggregated with the same mask, and metrics.
    """
    ratio_BA = log_ratio(log_probs_BA, old_log_probs_BA, mask_BA).exp()
    return _clipped(ratio_BA, advantages_B, mask_BA, clip)


def sequence_ratio_loss(
    log_probs_BA: torch.Tensor,
    old_log_probs_BA: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BA: torch.Tensor,
    clip: Clip,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """GSPO: the geometric mean of a sequence's ratios, clipped once for all of its tokens."""
    log_ratio_BA = log_ratio(log_probs_BA, old_log_probs_BA, mask_BA)
    ratio_B1 = sequence_mean(log_ratio_BA, mask_BA).exp()
    return _clipped(ratio_B1.expand_as(log_ratio_BA), advantages_B, mask_BA, clip)


def weighted_log_prob_loss(
    log_probs_BA: torch.Tensor,
    old_log_probs_BA: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BA: torch.Tensor,
    clip: Clip,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """CISPO: the log-probability, weighted by a capped ratio without a gradient, so that every token keeps its own."""
    ratio_BA = log_ratio(log_probs_BA, old_log_probs_BA, mask_BA).exp().detach()
    cap = 1 + clip.eps_high
    loss_BA = -ratio_BA.clamp(max=cap) * advantages_B[:, None] * log_probs_BA.where(mask_BA, 0)
    return loss_BA, {**_ratio_metrics(ratio_BA, mask_BA), "clip_high": masked_mean(ratio_BA > cap, mask_BA)}


def log_prob_loss(
    log_probs_BA: torch.Tensor,
    old_log_probs_BA: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BA: torch.Tensor,
    clip: Clip,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """REINFORCE: no ratio, so it is true for one optimizer step a rollout; the ratio metrics say how far off it is."""
    ratio_BA = log_ratio(log_probs_BA, old_log_probs_BA, mask_BA).exp().detach()
    return -advantages_B[:, None] * log_probs_BA.where(mask_BA, 0), _ratio_metrics(ratio_BA, mask_BA)


LOSSES: dict[str, LossKind] = {
    "grpo": LossKind(token_ratio_loss, "seq-mean-token-mean", "group_std", 0.2, 0.2),
    "dr_grpo": LossKind(token_ratio_loss, "seq-mean-token-sum-norm", "group_mean", 0.2, 0.2),
    "dapo": LossKind(token_ratio_loss, "token-mean", "group_std", 0.2, 0.28),
    "gspo": LossKind(sequence_ratio_loss, "seq-mean-token-mean", "group_std", 3e-4, 4e-4),
    "cispo": LossKind(weighted_log_prob_loss, "token-mean", "group_std", None, 4.0),
    "rloo": LossKind(log_prob_loss, "seq-mean-token-sum", "leave_one_out", None, None),
}

KL_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
}


def kl_terms(log_probs_BA: torch.Tensor, ref_log_probs_BA: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimates of KL(policy || reference) for each token, from samples of the policy. d = log policy - log reference.

    Args:
        kind: k1 = d is unbiased, and useless as a loss: its gradient is 0 on average. k2 = d²/2 has, on-policy, the
            gradient of the KL. k3 = exp(-d) - 1 + d is GRPO's: never negative, the best value to log.

    Raises:
        ValueError: unknown kind.

    Example:
        >>> kl_terms(torch.tensor([-0.5]), torch.zeros(1), "k2").tolist()
        [0.125]
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimate {kind!r}; known are {', '.join(KL_KINDS)}")
    return KL_KINDS[kind]((log_probs_BA - ref_log_probs_BA).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


class PolicyLoss(nn.Module):
    """The loss of one micro-batch of completions as its share of the optimizer step's, with metrics as sums.

    Args:
        loss: one of `LOSSES`; the row also names the advantages that go with it (`coati_ext.models.advantages`).
        aggregation: one of `AGGREGATIONS`; None: the loss's own.
        clip_eps_low, clip_eps_high: None: the loss's own.
        dual_clip: for a negative advantage, cap the loss at this many times its size (3 is usual); None: no cap.
        kl_coef: weight of the KL term; at 0 no reference is needed. A group without variance keeps this term.
        kl_kind: as in `kl_terms`.
        importance: correction for a sampler whose probabilities differ from the old policy's: one of
            `IMPORTANCE_KINDS`. It weighs the policy term, not the KL term.
        importance_cap: as in `importance_weights`.
        max_length: the constant of seq-mean-token-sum-norm.

    Raises:
        ValueError: names that are unknown, bounds that are out of range or that the loss has no use for.
    """

    def __init__(
        self,
        *,
        loss: str = "grpo",
        aggregation: str | None = None,
        clip_eps_low: float | None = None,
        clip_eps_high: float | None = None,
        dual_clip: float | None = None,
        kl_coef: float = 0.0,
        kl_kind: str = "k3",
        importance: str = "none",
        importance_cap: float = 2.0,
        max_length: int | None = None,
    ):
        super().__init__()
        if loss not in LOSSES:
            raise ValueError(f"unknown policy loss {loss!r}; known are {', '.join(LOSSES)}")
        if kl_kind not in KL_KINDS:
            raise ValueError(f"unknown KL estimate {kl_kind!r}; known are {', '.join(KL_KINDS)}")
        if not 0 <= kl_coef < float("inf"):
            raise ValueError(f"kl_coef must be at least 0 and finite, got {kl_coef}")
        check_importance(importance, importance_cap)
        self.kind = LOSSES[loss]
        self.aggregation = self.kind.aggregation if aggregation is None else aggregation
        check_aggregation(self.aggregation, max_length)
        self.clip = _clip_of(loss, clip_eps_low, clip_eps_high, dual_clip)
        self.kl_coef, self.kl_kind = kl_coef, kl_kind
        self.importance, self.importance_cap = importance, importance_cap
        self.max_length = max_length

    def forward(
        self,
        log_probs_BA: torch.Tensor,
        old_log_probs_BA: torch.Tensor | None,
        advantages_B: torch.Tensor,
        action_mask_BA: torch.Tensor,
        *,
        denominators: Denominators,
        ref_log_probs_BA: torch.Tensor | None = None,
        sampler_log_probs_BA: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """
        Args:
            log_probs_BA: of the policy, with gradients; fp32.
            old_log_probs_BA: of the policy before the update; None if that is this one: the ratio is then 1.
            advantages_B: 0 for a completion without a valid reward, whose row of the mask is false too.
            action_mask_BA: true where a token is in the loss.
            denominators: of the whole optimizer step.
            ref_log_probs_BA: of the reference; without a `kl_coef` for the metric only.
            sampler_log_probs_BA: as the rollout engine gave them, at the sampling temperature; with `importance` "none"
                for the metrics only.

        Returns:
            A scalar, and metrics for `MetricSums`, under the same names whatever the batch holds: policy_loss (adds
            up to the whole, as the loss does), ratio, ratio_max, clip_low, clip_high, clip_dual as the loss has them;
            kl (k3, unscaled); mismatch_kl (k3), mismatch_kl_max, importance_weight, importance_clipped.

        Raises:
            ValueError: shapes or dtypes that do not fit, or something missing that the settings ask for.
        """
        others = {
            "action mask": action_mask_BA,
            "old log-probabilities": old_log_probs_BA,
            "reference's log-probabilities": ref_log_probs_BA,
            "sampler's log-probabilities": sampler_log_probs_BA,
        }
        _check_shapes(log_probs_BA, advantages_B, others)
        if self.kl_coef > 0 and ref_log_probs_BA is None:
            raise ValueError(f"kl_coef {self.kl_coef} needs the log-probabilities of the reference")
        if self.importance != "none" and sampler_log_probs_BA is None:
            raise ValueError(f"importance {self.importance!r} needs the log-probabilities that the sampler gave")
        mask_BA = action_mask_BA.bool()
        old_log_probs_BA = (log_probs_BA if old_log_probs_BA is None else old_log_probs_BA).detach()
        loss_BA, metrics = self.kind.function(log_probs_BA, old_log_probs_BA, advantages_B, mask_BA, self.clip)
        if sampler_log_probs_BA is not None:
            weights_BA, found = self._correction(old_log_probs_BA, sampler_log_probs_BA, mask_BA)
            loss_BA = loss_BA * weights_BA
            metrics |= found
        loss = aggregate(loss_BA, mask_BA, self.aggregation, denominators, self.max_length)
        metrics["policy_loss"] = Sum(loss.detach())
        if ref_log_probs_BA is not None:
            metrics["kl"] = masked_mean(kl_terms(log_probs_BA.detach(), ref_log_probs_BA, "k3"), mask_BA)
        if self.kl_coef > 0:
            kl_BA = kl_terms(log_probs_BA, ref_log_probs_BA.detach(), self.kl_kind)
            loss = loss + self.kl_coef * aggregate(kl_BA, mask_BA, self.aggregation, denominators, self.max_length)
        return loss, metrics

    def _correction(
        self, old_log_probs_BA: torch.Tensor, sampler_log_probs_BA: torch.Tensor, mask_BA: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Weights of the policy term, and how far the sampler was from the old policy."""
        kind, cap = self.importance, self.importance_cap
        weights_BA = importance_weights(old_log_probs_BA, sampler_log_probs_BA, mask_BA, kind, cap)
        metrics = mismatch_metrics(old_log_probs_BA, sampler_log_probs_BA, mask_BA)
        if kind != "none":
            limited_BA = weights_BA >= cap if kind == "token_truncate" else weights_BA == 0
            metrics["importance_weight"] = masked_mean(weights_BA, mask_BA)
            metrics["importance_clipped"] = masked_mean(limited_BA, mask_BA)
        return weights_BA, metrics


def _check_shapes(
    log_probs_BA: torch.Tensor, advantages_B: torch.Tensor, others: dict[str, torch.Tensor | None]
) -> None:
    if log_probs_BA.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the policy's log-probabilities must be fp32, got {log_probs_BA.dtype}")
    if log_probs_BA.dim() != 2:
        raise ValueError(f"log-probabilities must be (sequences, tokens), got {tuple(log_probs_BA.shape)}")
    if advantages_B.shape != log_probs_BA.shape[:1]:
        raise ValueError(f"{len(log_probs_BA)} sequences but advantages {tuple(advantages_B.shape)}")
    for name, other in others.items():
        if other is not None and other.shape != log_probs_BA.shape:
            shapes = f"{tuple(other.shape)}, the policy's log-probabilities {tuple(log_probs_BA.shape)}"
            raise ValueError(f"the shape of the {name} is {shapes}")


def _clipped(
    ratio_BA: torch.Tensor, advantages_B: torch.Tensor, mask_BA: torch.Tensor, clip: Clip
) -> tuple[torch.Tensor, dict[str, Metric]]:
    advantages_B1 = advantages_B[:, None]
    low, high = 1 - clip.eps_low, 1 + clip.eps_high
    gain_BA = torch.minimum(ratio_BA * advantages_B1, ratio_BA.clamp(low, high) * advantages_B1)
    bad_B1, good_B1 = advantages_B1 < 0, advantages_B1 > 0
    metrics = {
        **_ratio_metrics(ratio_BA, mask_BA),
        "clip_low": masked_mean((ratio_BA < low) & bad_B1, mask_BA),
        "clip_high": masked_mean((ratio_BA > high) & good_B1, mask_BA),
    }
    if clip.dual is not None:
        gain_BA = torch.where(bad_B1, gain_BA.maximum(clip.dual * advantages_B1), gain_BA)
        metrics["clip_dual"] = masked_mean((ratio_BA > clip.dual) & bad_B1, mask_BA)
    return -gain_BA, metrics


def _ratio_metrics(ratio_BA: torch.Tensor, mask_BA: torch.Tensor) -> dict[str, Metric]:
    return {"ratio": masked_mean(ratio_BA, mask_BA), "ratio_max": masked_max(ratio_BA, mask_BA)}


def _clip_of(loss: str, eps_low: float | None, eps_high: float | None, dual: float | None) -> Clip:
    """The bounds given, else those of the table."""
    kind = LOSSES[loss]
    given = {"clip_eps_low": eps_low, "clip_eps_high": eps_high, "dual_clip": dual}
    useless = [
        name
        for name, own in (
            ("clip_eps_low", kind.clip_eps_low),
            ("clip_eps_high", kind.clip_eps_high),
            ("dual_clip", kind.clip_eps_low),
        )
        if own is None and given[name] is not None
    ]
    if useless:
        raise ValueError(f"policy loss {loss!r} has no use for {', '.join(useless)}; leave it out")
    if eps_low is not None and not 0 <= eps_low < 1:
        raise ValueError(f"clip_eps_low must be at least 0 and below 1, got {eps_low}")
    if eps_high is not None and not eps_high >= 0:
        raise ValueError(f"clip_eps_high must be at least 0, got {eps_high}")
    if dual is not None and not dual > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual}")
    low = kind.clip_eps_low if eps_low is None else eps_low
    return Clip(low, kind.clip_eps_high if eps_high is None else eps_high, dual)
