"""What completions are paid, by verifiable rewards, a trained reward model, or both."""

from collections.abc import Sequence
from typing import Any

from coati_ext.models.reward import RewardModel, RLVRRewardModel
from coati_ext.models.reward_score import Score, add_scores

Model = RLVRRewardModel | RewardModel
RewardModels = Model | Sequence[tuple[Model, float]]


def score_completions(
    reward_model: RewardModels,
    prompts: Sequence[dict[str, Any]],
    completions: Sequence[str],
    truncated: Sequence[bool],
    lengths: Sequence[int],
) -> list[Score]:
    """One score a completion.

    Args:
        reward_model: one model, or several with weights, whose scores are added.
        prompts: the prompt of each completion, an item of `RawPromptDataset`.
        lengths: in tokens.

    Raises:
        ValueError: a reward lacks what it needs.
        RuntimeError: a reward failed; the text names it and the prompt's file and line.
    """
    if not completions:
        return []
    if isinstance(reward_model, RLVRRewardModel):
        golds = [prompt["gt_answer"] for prompt in prompts]
        metadata = [prompt["metadata"] for prompt in prompts]
        sources = [prompt["source"] for prompt in prompts]
        return reward_model(
            completions, golds, truncated=truncated, lengths=lengths, metadata=metadata, sources=sources
        )
    if isinstance(reward_model, RewardModel):
        values = reward_model([prompt["text"] for prompt in prompts], completions)
        return [_of_model(value) for value in values]
    parts = [score_completions(model, prompts, completions, truncated, lengths) for model, _ in reward_model]
    weights = [weight for _, weight in reward_model]
    names = ["rlvr" if isinstance(model, RLVRRewardModel) else "reward_model" for model, _ in reward_model]
    return [add_scores(dict(zip(names, scores, strict=True)), weights) for scores in zip(*parts, strict=True)]


def _of_model(value: float) -> Score:
    """It judges no answer, so there is no accuracy."""
    return Score(score=value, accuracy=None, parts={"score": value}, reason="unjudged")
