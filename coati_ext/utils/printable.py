"""Text that a model or a file made, so that a terminal or a page shows it and does nothing else."""

import unicodedata

_UNPRINTABLE = {"Cc", "Cf", "Cn", "Cs", "Zl", "Zp"}  # Unicode categories
_KEPT = "\n\t\u200c\u200d"  # the joiners stand between letters of some scripts and inside emoji


def printable(text: str) -> str:
    """With � for what moves a cursor, sets a colour, turns the direction of text or is no character.

    Example:
        >>> printable("a\\x1b[31mred\\ud83d")
        'a�[31mred�'
    """
    return "".join("�" if unicodedata.category(char) in _UNPRINTABLE and char not in _KEPT else char for char in text)


def one_line(text: str) -> str:
    """`printable`, with ⏎ for newlines and a space for tabs."""
    return printable(text.replace("\r\n", "\n").replace("\n", "⏎").replace("\t", " "))


def num_columns(text: str) -> int:
    """At most what a terminal takes for a printable line: a combining mark counts as a column."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def clip(text: str, width: int) -> str:
    """The start of a printable line, with … where it was cut, in at most `width` columns.

    Example:
        >>> clip("forty-two", 6), clip("四十二", 5)
        ('forty…', '四十…')
    """
    if num_columns(text) <= width:
        return text
    kept, room = [], width - 1
    for char in text:
        room -= num_columns(char)
        if room < 0:
            break
        kept.append(char)
    return "".join([*kept, "…"]) if width > 0 else ""


def clip_start(text: str, width: int) -> str:
    """The end of a printable line, as `clip` gives the start.

    Example:
        >>> clip_start("forty-two", 6)
        '…y-two'
    """
    return clip(text[::-1], width)[::-1]
