"""What a preparation of prompts dropped and wrote, and how files are written all or not at all."""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Dropped:
    """Counts by reason, and where each reason was met first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, where)

    def total(self) -> int:
        return self.counts.total()

    def format(self) -> str:
        """`2 no gold (first: FILE:7), ...`, most frequent first."""
        return ", ".join(
            f"{count:,} {reason} (first: {self.first[reason]})" for reason, count in self.counts.most_common()
        )


@dataclass(frozen=True, kw_only=True)
class PreparedPrompts:
    """What was read, dropped and written."""

    outputs: dict[Path, int]
    """Prompts in each file."""
    num_read: int
    num_over_max_samples: int
    """Usable prompts left out by `max_samples`."""
    dropped: Dropped
    first: dict[str, Any]
    """The first prompt of the first file."""

    def format(self) -> str:
        """The counts and the first prompt, for the terminal."""
        lines = [f"{self.num_read:,} read, {self.dropped.total():,} dropped"]
        lines[0] += f": {self.dropped.format()}" if self.dropped.counts else ""
        if self.num_over_max_samples:
            lines.append(f"{self.num_over_max_samples:,} more left out by --max_samples")
        lines += [f"{count:,} prompts in {path}" for path, count in self.outputs.items()]
        turns = (f"[{message['role']}]\n{message['content']}" for message in self.first["messages"])
        gold = json.dumps(self.first["gt_answer"], ensure_ascii=False)
        return "\n".join([*lines, "first prompt:", *turns, f"[gt_answer]\n{gold}"])


def write_files(prompts: dict[Path, list[dict[str, Any]]]) -> None:
    """Write each file beside its place, then move all of them there: no reader ever meets half a file."""
    written = {}
    try:
        for path, items in prompts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            written[path] = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            with open(written[path], "w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        for path, temporary in written.items():
            os.replace(temporary, path)
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)
