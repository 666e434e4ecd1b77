"""Questions with answers (GSM8K, MATH, tasks made by programs) -> prompt JSONL, checked, without duplicates, split.

A line of the input is one of

    {"question": ..., "answer": "... #### 18"}      GSM8K; or "problem" and "solution" with a last \\boxed{}, as MATH
    {"messages": [...], "gt_answer": ...}           a prompt already: checked and copied

Other names are given by `question_field`, `answer_field` and `gold_field`. A broken line is an error; a line that is
whole but of no use is dropped, counted and named, and with `skip_bad_lines` so is a broken one. Nothing is written
before everything is known to be right.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coati_ext.dataset.jsonl import check_prompt, is_blank, iter_jsonl, iter_prompts
from coati_ext.dataset.prepared import Dropped, PreparedPrompts, write_files
from coati_ext.dataset.tasks import make_samples

_ANSWERS = {"question": ("answer", "solution"), "problem": ("solution", "answer")}
# The last alternative is a box without braces, as TeX allows it.
_MARK = re.compile(
    r"(?<!#)(?P<hashes>####)(?!#)|\\(?:boxed|fbox)(?:[ \t]*(?P<brace>\{)|[ \t]+(?P<bare>[^\s{}$]+)(?=\$))"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?:[+-]?(?:\\?[$€£])?|\\?[$€£][+-])(?:{_DIGITS})(?:[eE][+-]?[0-9]+|/[1-9][0-9]*)?\\?%?")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to read, how to ask it, and what to write.

    Raises:
        ValueError: settings that contradict each other, by the name of the flag.
    """

    output: Path
    """The prompt file."""
    input: Path | None = None
    """JSONL to read; or else `tasks`."""
    question_field: str | None = None
    """None: `question` or `problem`, whichever a line has."""
    answer_field: str | None = None
    """Holds the worked answer that ends in the gold; None: `answer` or `solution`."""
    gold_field: str | None = None
    """Holds the bare gold; None: `gt_answer` if there is one, or else it is read from the worked answer."""
    tasks: tuple[str, ...] = ()
    """`builtin:NAME`, or a task of reasoning-gym."""
    num_samples: int = 1000
    """Of all tasks together, in equal shares."""
    seed: int = 0
    """Of the tasks' samples."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Options of the one task."""
    instruction: str | None = None
    """Put behind the question, in a paragraph of its own."""
    system_message: str | None = None
    """Put before prompts that have no system turn."""
    number_gold: bool = False
    """Drop golds that are not one number."""
    exclude: tuple[Path, ...] = ()
    """Prompt files whose questions are left out, such as a test set prepared before."""
    shuffle_seed: int | None = None
    """None: the order of the input."""
    max_samples: int | None = None
    """Prompts kept, held-out ones included; the first after shuffling."""
    num_test: int | None = None
    """Prompts held out; or `test_fraction`."""
    test_fraction: float | None = None
    test_output: Path | None = None
    """None: `output` with `_test` added to its name."""
    skip_bad_lines: bool = False
    """Drop and count broken lines, instead of stopping at the first."""
    overwrite: bool = False

    def __post_init__(self) -> None:
        if (self.input is None) == (not self.tasks):
            raise ValueError("expected one of --input and --task")
        if self.task_options and len(self.tasks) != 1:
            raise ValueError("--task_options are of one task; expected --task with one name")
        for flag, value in (("num_samples", self.num_samples), ("max_samples", self.max_samples)):
            if value is not None and value < 1:
                raise ValueError(f"--{flag} is {value}; expected 1 or more")
        if self.num_samples < len(self.tasks):
            raise ValueError(f"--num_samples is {self.num_samples} for {len(self.tasks)} tasks; expected one each")
        if self.num_test is not None and self.test_fraction is not None:
            raise ValueError("--num_test and --test_fraction both say how many to hold out; leave one of them out")
        if self.num_test is not None and self.num_test < 1:
            raise ValueError(f"--num_test is {self.num_test}; expected 1 or more")
        if self.test_fraction is not None and not 0 < self.test_fraction < 1:
            raise ValueError(f"--test_fraction is {self.test_fraction}; expected more than 0 and less than 1")
        if self.test_output is not None and not self.holds_out:
            raise ValueError("--test_output without --num_test or --test_fraction: nothing is held out")
        self._check_outputs()

    @property
    def holds_out(self) -> bool:
        return self.num_test is not None or self.test_fraction is not None

    @property
    def outputs(self) -> list[Path]:
        """The prompt file and, if prompts are held out, their file."""
        if not self.holds_out:
            return [self.output]
        default = self.output.with_name(f"{self.output.stem}_test{self.output.suffix}")
        return [self.output, self.test_output or default]

    def _check_outputs(self) -> None:
        read = {path.resolve() for path in (self.input, *self.exclude) if path is not None}
        for path in self.outputs:
            if path.resolve() in read:
                raise ValueError(f"{path} would be read and written; expected another --output")
            if path.is_dir():
                raise ValueError(f"{path} is a directory; expected a file to write")
            if path.exists() and not self.overwrite:
                raise ValueError(f"{path} exists; give another name, or --overwrite to replace it")
        if len({path.resolve() for path in self.outputs}) < len(self.outputs):
            raise ValueError(f"--output and --test_output are the same file, {self.output}")


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A prompt before the instruction and the system message; a gold that is blank is none."""

    messages: list[dict[str, Any]]
    gold: Any
    extras: dict[str, Any]
    where: str
    key: str | None = None
    """Equal for the same question, beside its text."""


def prepare(config: PrepareConfig) -> PreparedPrompts:
    """Read, check, deduplicate, split and write; returns the counts.

    Raises:
        ValueError: a broken line (`FILE:LINE: ...`), an unknown task, or nothing left to write or to hold out from.
        OSError: a file cannot be read or written.
    """
    dropped = Dropped()
    rows = list(_without_duplicates(_usable(_rows(config, dropped), config, dropped), config, dropped))
    num_read = len(rows) + dropped.total()
    if not rows:
        raise ValueError(f"no prompt is left of {num_read:,}: {dropped.format()}{_advice(dropped)}")
    if config.shuffle_seed is not None:
        random.Random(f"shuffle/{config.shuffle_seed}").shuffle(rows)
    num_usable = len(rows)
    rows = rows[: config.max_samples]
    parts = _split(rows, config)
    prompts = [[_prompt(row, config) for row in part] for part in parts]
    write_files(dict(zip(config.outputs, prompts, strict=True)))
    return PreparedPrompts(
        outputs=dict(zip(config.outputs, map(len, parts), strict=True)),
        num_read=num_read,
        num_over_max_samples=num_usable - len(rows),
        dropped=dropped,
        first=prompts[0][0],
    )


def marked_gold(text: str) -> str | None:
    """What follows the last `####` on its line, or stands in the last `\\boxed{}`: whichever comes last in the text.

    None without either, with nothing in it, or with a brace that is not closed.

    Example:
        >>> marked_gold("48 / 2 = 24\\n#### 24"), marked_gold(r"so \\boxed{\\frac{1}{2}}, not 2"), marked_gold("24")
        ('24', '\\\\frac{1}{2}', None)
    """
    marks = list(_MARK.finditer(text))
    if not marks:
        return None
    mark = marks[-1]
    if mark["hashes"]:
        return text[mark.end() :].partition("\n")[0].strip() or None
    if mark["bare"]:
        return mark["bare"]
    depth = 1
    for brace in _BRACE.finditer(text, mark.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[mark.end() : brace.start()].strip() or None
    return None


def is_number(gold: Any) -> bool:
    """Whether a gold is one number: signs, true thousands separators, currency, percent, fractions, exponents.

    Example:
        >>> [is_number(gold) for gold in ("1,234", "-$5.50", "3/4", 7, "1,23", "x = 4", "5 apples", True)]
        [True, True, True, True, False, False, False, False]
    """
    if isinstance(gold, str):
        return _NUMBER.fullmatch(gold.strip()) is not None
    return isinstance(gold, int | float) and not isinstance(gold, bool)


def _rows(config: PrepareConfig, dropped: Dropped) -> Iterator[_Row]:
    if config.input is not None:
        yield from _file_rows(config, dropped)
        return
    share, more = divmod(config.num_samples, len(config.tasks))
    for number, task in enumerate(config.tasks):
        samples = make_samples(task, share + (number < more), config.seed, config.task_options)
        for index, sample in enumerate(samples):
            yield _Row(
                messages=[{"role": "user", "content": sample.question}],
                gold=sample.gold,
                extras={"task": task, "metadata": sample.metadata},
                where=f"{task}[{index}]",
                key=sample.key and f"{task}: {sample.key}",
            )


def _file_rows(config: PrepareConfig, dropped: Dropped) -> Iterator[_Row]:
    def parse(value: Any) -> _Row:
        if not isinstance(value, dict):
            raise ValueError(f"the line is of type {type(value).__name__}; expected an object")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the line holds half of a \\ud... escape pair, which is no character") from None
        is_prompt = "messages" in value and config.question_field is None
        return _messages_row(value, config) if is_prompt else _question_row(value, config)

    def drop(error: ValueError) -> None:
        dropped.add("broken line", str(error))

    for line, row in iter_jsonl(config.input, parse, on_error=drop if config.skip_bad_lines else None):
        yield replace(row, where=f"{config.input}:{line}")


def _messages_row(value: dict[str, Any], config: PrepareConfig) -> _Row:
    name = config.gold_field or "gt_answer"
    gold = _field(value, [name], "--gold_field")[1]
    prompt = check_prompt({key: item for key, item in value.items() if key != "gt_answer"}, require_gold=False)
    tools = {"tools": prompt["tools"]} if prompt["tools"] else {}
    extras = {key: item for key, item in prompt["metadata"].items() if key != name}
    return _Row(messages=prompt["messages"], gold=_stripped(gold), extras={**tools, **extras}, where="")


def _question_row(value: dict[str, Any], config: PrepareConfig) -> _Row:
    names = [config.question_field] if config.question_field else list(_ANSWERS)
    question_name, question = _field(value, names, "--question_field")
    if not isinstance(question, str):
        raise ValueError(f"{question_name!r} is of type {type(question).__name__}; expected text")
    answer_names = [config.answer_field] if config.answer_field else _ANSWERS.get(question_name, _ANSWERS["question"])
    if config.gold_field:
        used, gold = _field(value, [config.gold_field], "--gold_field")
    elif "gt_answer" in value and config.answer_field is None:
        used, gold = "gt_answer", value["gt_answer"]
    else:
        used, answer = _field(value, answer_names, "--answer_field")
        if not isinstance(answer, str):
            raise ValueError(f"{used!r} is of type {type(answer).__name__}; expected text (a bare gold: --gold_field)")
        gold = marked_gold(answer)
    left_out = {question_name, used, *answer_names, "messages", "tools", "gt_answer"}
    extras = {key: item for key, item in value.items() if key not in left_out}
    messages = [{"role": "user", "content": question.strip()}]
    return _Row(messages=messages, gold=_stripped(gold), extras=extras, where="")


def _field(value: dict[str, Any], names: list[str] | tuple[str, ...], flag: str) -> tuple[str, Any]:
    for name in names:
        if name in value:
            return name, value[name]
    keys = ", ".join(map(repr, value)) or "none"
    raise ValueError(f"no {' or '.join(map(repr, names))} (the line's keys: {keys}); name the field with {flag}")


def _stripped(gold: Any) -> Any:
    return gold.strip() if isinstance(gold, str) else gold


def _usable(rows: Iterator[_Row], config: PrepareConfig, dropped: Dropped) -> Iterator[_Row]:
    for row in rows:
        if not row.messages[-1]["content"].strip():
            dropped.add("empty question", row.where)
        elif is_blank(row.gold):
            dropped.add("no gold", row.where)
        elif config.number_gold and not is_number(row.gold):
            dropped.add("gold is no number", f"{row.where}: {row.gold!r}")
        else:
            yield row


def _without_duplicates(rows: Iterator[_Row], config: PrepareConfig, dropped: Dropped) -> Iterator[_Row]:
    """The first of each question, whatever its gold, and none that an excluded file has."""
    excluded = {
        _key(prompt.messages, config.instruction): path.name
        for path in config.exclude
        for prompt in iter_prompts(path, require_gold=False)
    }
    golds: dict[str, str] = {}
    for row in rows:
        text = _key(row.messages, config.instruction)
        key = row.key or text
        if text in excluded:
            dropped.add(f"question of {excluded[text]}", row.where)
        elif key not in golds:
            golds[key] = str(row.gold)
            yield row
        else:
            same = golds[key] == str(row.gold)
            dropped.add("duplicate" if same else "duplicate question with another gold", row.where)


def _key(messages: list[dict[str, Any]], instruction: str | None) -> str:
    """Equal for the same question: white space, case, the system turn and the instruction aside."""
    contents = [str(message["content"]) for message in messages if message["role"] not in ("system", "developer")]
    contents[-1] = contents[-1].strip().removesuffix((instruction or "").strip())
    return "\0".join(" ".join(content.split()).casefold() for content in contents)


def _split(rows: list[_Row], config: PrepareConfig) -> list[list[_Row]]:
    """[rows] or [training rows, held-out rows], each in order; which are held out is drawn by a seed."""
    if not config.holds_out:
        return [rows]
    num_test = config.num_test or max(1, round(config.test_fraction * len(rows)))
    if num_test >= len(rows):
        raise ValueError(f"{num_test:,} of {len(rows):,} prompts would be held out; expected some left to train on")
    draw = random.Random(f"held out/{config.shuffle_seed or 0}")
    held_out = set(draw.sample(range(len(rows)), num_test))
    return [[row for i, row in enumerate(rows) if (i in held_out) == test] for test in (False, True)]


def _prompt(row: _Row, config: PrepareConfig) -> dict[str, Any]:
    *before, last = row.messages
    if config.instruction:
        last = {**last, "content": f"{last['content'].rstrip()}\n\n{config.instruction}"}
    if config.system_message and row.messages[0]["role"] not in ("system", "developer"):
        before = [{"role": "system", "content": config.system_message}, *before]
    return {"messages": [*before, last], "gt_answer": row.gold, **row.extras}


def _advice(dropped: Dropped) -> str:
    if "no gold" not in dropped.counts:
        return ""
    return "; a gold is what follows #### or stands in \\boxed{}: name the field of a bare gold with --gold_field"
