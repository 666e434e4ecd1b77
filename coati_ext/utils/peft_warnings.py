"""One warning of PEFT that is wrong about our adapters."""

import warnings


def ignore_pattern_warnings() -> None:
    """Inside `warnings.catch_warnings()`: "rank_pattern keys did not match any targeted module and were ignored".

    PEFT looks for the pattern among the target modules only; it has applied it to the target parameters (the routed
    experts' gate_up_proj, whose two halves have rank r each).
    """
    warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
