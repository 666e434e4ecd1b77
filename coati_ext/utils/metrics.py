"""Metrics of a run: TensorBoard and one JSON object a step, written by rank 0."""

import json
import math
from pathlib import Path
from typing import Any


class MetricsLogger:
    """Scalars to TensorBoard, everything to `metrics.jsonl`; does nothing on other ranks.

    Args:
        tensorboard_dir: made if missing.
        jsonl_path: appended to, flushed at every step, so that a killed run keeps what it had.
        enabled: true on rank 0 only.
        first_step: TensorBoard drops what an interrupted run wrote from this step on.
        wandb_settings: also send TensorBoard's scalars to Weights & Biases, with these settings of the run; None: not.
    """

    def __init__(
        self,
        tensorboard_dir: str | Path,
        jsonl_path: str | Path,
        *,
        enabled: bool,
        first_step: int | None = None,
        wandb_settings: dict[str, Any] | None = None,
    ):
        self._writer = self._jsonl = self._wandb = None
        if not enabled:
            return
        if wandb_settings is not None:
            import wandb

            self._wandb = wandb.init(project="coati_ext", config=wandb_settings, dir=str(Path(jsonl_path).parent))
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(tensorboard_dir), purge_step=first_step)
        self._jsonl = open(jsonl_path, "a", encoding="utf-8")  # noqa: SIM115 (held open for the run, closed in close)

    def log(self, step: int, scalars: dict[str, float], **extra: Any) -> None:
        """What is not finite is null in the JSON line, which has no NaN, and left out of TensorBoard.

        Args:
            scalars: by TensorBoard tag.
            extra: goes to the JSON line only; what JSON can hold.
        """
        if self._writer is None:
            return
        scalars = {tag: value if math.isfinite(value) else None for tag, value in scalars.items()}
        for tag, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step)
        if self._wandb is not None:
            self._wandb.log({tag: value for tag, value in scalars.items() if value is not None}, step=step)
        self._jsonl.write(json.dumps({"step": step, **scalars, **extra}, allow_nan=False) + "\n")
        self._jsonl.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._jsonl.close()
        if self._wandb is not None:
            self._wandb.finish()
