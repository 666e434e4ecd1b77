"""Sizes for people."""


def format_bytes(num_bytes: float) -> str:
    """In the unit, of 1000 each, that leaves at least one digit before the point; GB is the largest.

    Example:
        >>> [format_bytes(size) for size in (999, 170_112, 999_999, 689 * 10**9)]
        ['999 B', '170.1 KB', '1.0 MB', '689.0 GB']
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if round(num_bytes / size, 4) >= 1:  # not 1,000.0 of the smaller unit
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} B"
