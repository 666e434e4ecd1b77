"""Completions with their log-probabilities and advantages, kept between collecting and training."""

from coati_ext.experience_buffer.experience import Experience
from coati_ext.experience_buffer.naive import NaiveExperienceBuffer

__all__ = ["Experience", "NaiveExperienceBuffer"]
