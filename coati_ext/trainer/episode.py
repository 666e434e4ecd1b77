"""What is said of an episode: its metrics from the sums of all ranks, a warning where nothing was learnt, one line."""

from collections.abc import Mapping

from coati_ext.experience_maker.metrics import finished_metrics
from coati_ext.utils.launch import print_rank_0

MAX_EPISODES_WITHOUT_SIGNAL = 10
PHASES = ("generate", "reward", "log_probs", "train")


def episode_metrics(reduced: Mapping[str, float], *, num_ranks: int, num_steps: int) -> dict[str, float]:
    """From sums over ranks and steps to what a step or a rank had.

    Args:
        reduced: of `MetricSums.reduce` over the data-parallel ranks.
        num_steps: optimizer steps of the episode.

    Returns:
        The same names, with tokens_per_s/generate and tokens_per_s/train (of all ranks) in place of the tokens.
    """
    metrics = finished_metrics(reduced)
    for phase in PHASES:
        if f"seconds/{phase}" in metrics:
            metrics[f"seconds/{phase}"] /= num_ranks  # the ranks wait for each other
    for phase in ("generate", "train"):
        tokens, seconds = metrics.pop(f"tokens/{phase}", 0.0), metrics.get(f"seconds/{phase}", 0.0)
        metrics[f"tokens_per_s/{phase}"] = tokens / max(seconds, 1e-9)
    for name in ("policy_loss", "ptx_loss"):
        if name in metrics:
            metrics[name] /= num_steps
    return metrics


def idle_text(metrics: Mapping[str, float], episode: int, *, mask_truncated: bool = False) -> str:
    """Why an episode without a signal had none, from the verdicts on its completions."""
    rates = {name.partition("/")[2]: rate for name, rate in metrics.items() if name.startswith("reasons/") and rate}
    shown = ", ".join(f"{name} {rate:.0%}" for name, rate in sorted(rates.items(), key=lambda item: -item[1]))
    mean = f"mean {metrics['reward']:.3g}" if "reward" in metrics else "no reward"
    unscored, cut = metrics["unscored"], metrics["length/truncated"]
    if mask_truncated and cut == 1:
        return (
            f"episode {episode}: every completion was cut at --max_seq_len, and --mask_truncated leaves these out "
            "of the loss, so there was nothing to learn"
        )
    return (
        f"episode {episode}: no group had completions of different reward ({mean}; {shown}; {unscored:.0%} "
        f"unscored; {cut:.0%} cut at the limit), so there was nothing to learn"
    )


def warn_of_no_signal(
    metrics: Mapping[str, float], episode: int, *, has_learnt: bool, mask_truncated: bool = False
) -> None:
    """
    Raises:
        ValueError: rewards have not differed within a group in any of `MAX_EPISODES_WITHOUT_SIGNAL` episodes.
    """
    text = idle_text(metrics, episode, mask_truncated=mask_truncated)
    if not has_learnt and episode >= MAX_EPISODES_WITHOUT_SIGNAL:
        raise ValueError(
            f"{text}, as in all {episode} episodes so far. Look at samples.jsonl: does the prompt ask for the form "
            "that --reward_functions look for, and is --max_seq_len long enough?"
        )
    print_rank_0(f"warning: {text}")


def progress_text(metrics: Mapping[str, float]) -> str:
    """For a progress bar."""
    shown = {
        "reward": "reward {:.3f}",
        "accuracy": "accuracy {:.1%}",
        "zero_variance": "zero variance {:.0%}",
        "length/mean": "length {:.0f}",
    }
    return ", ".join(form.format(metrics[name]) for name, form in shown.items() if name in metrics)
