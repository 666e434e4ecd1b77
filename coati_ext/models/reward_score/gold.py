"""Reading of golds as data sets have them: text, numbers, or a worked solution that ends in a marked answer."""

from typing import Any

from coati_ext.models.reward_score.answer import marked


def gold_text(gold: Any) -> str | None:
    """The gold as stripped text; None for what cannot be one: None, "", a list, true.

    Of a solution with `####` or a box, as GSM8K and MATH have them, the answer.

    Example:
        >>> gold_text(" 42 "), gold_text(0.5), gold_text("6 * 7 = 42\\n#### 42"), gold_text(None)
        ('42', '0.5', '42', None)
    """
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return None
    text = str(gold).strip()
    answer = marked(text, truncated=False)
    return (text if answer is None else answer.text) or None
