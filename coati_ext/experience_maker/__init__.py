"""From prompts to experience: completions, what they are paid, and their log-probabilities."""

from coati_ext.experience_maker.naive import NaiveExperienceMaker
from coati_ext.experience_maker.rollout import Completion, Rollout
from coati_ext.experience_maker.scoring import score_completions

__all__ = ["Completion", "NaiveExperienceMaker", "Rollout", "score_completions"]
