"""Preparation of prompts: golds, fields, duplicates, held-out prompts, files."""

import json
from pathlib import Path

import pytest

from coati_ext.dataset.jsonl import iter_prompts
from coati_ext.dataset.prepare import PrepareConfig, is_number, marked_gold, prepare

FARM = {"question": "Ann has 3 hens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
SHOP = {"question": "A pen is $2. What do 600 cost?", "answer": "600 * 2 = 1200\n#### 1,200"}
MATH = {"problem": "Halve $1$.", "level": "Level 1", "solution": r"It is not $\boxed{2}$ but $\boxed{\frac{1}{2}}$."}
CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}], "gt_answer": 4, "reward": "number"}


@pytest.fixture
def run(tmp_path, write_jsonl):
    """Prepare lines, or tasks; returns (report, prompts, held-out prompts)."""

    def run(*lines, **settings):
        source = {} if "tasks" in settings else {"input": Path(write_jsonl(*lines))}
        config = PrepareConfig(output=tmp_path / "out" / "prompts.jsonl", overwrite=True, **source, **settings)
        report = prepare(config)
        written = [[json.loads(line) for line in path.read_text().splitlines()] for path in config.outputs]
        assert [len(part) for part in written] == list(report.outputs.values())
        for path in config.outputs:
            assert len(list(iter_prompts(path))) == report.outputs[path]
        return report, written[0], written[-1]

    return run


def text(prompt):
    return prompt["messages"][-1]["content"]


GOLDS = {
    "gsm8k": ("3 + 4 = <<3+4=7>>7\n#### 7", "7"),
    "last mark": ("#### 3\nno:\n#### 7", "7"),
    "rest of the line only": ("#### 7\nThat is all.", "7"),
    "windows line": ("#### 7\r\n", "7"),
    "heading": ("##### 5 hens", None),
    "box": (r"so $\boxed{7}$.", "7"),
    "nested box": (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
    "escaped brace": (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    "half a set": (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
    "box without braces": (r"so $\boxed 7$.", "7"),
    "fbox": (r"\fbox{7}", "7"),
    "last box": (r"\boxed{1} or \boxed{2}", "2"),
    "box after a heading": ("#### Step 1\nthus \\boxed{7}", "7"),
    "mark after a box": ("\\boxed{6}\n#### 7", "7"),
    "box in a mark": (r"#### \boxed{7}", "7"),
    "open box": (r"\boxed{7", None),
    "empty box": (r"\boxed{ }", None),
    "empty mark": ("#### ", None),
    "none": ("7", None),
}


@pytest.mark.parametrize(("answer", "gold"), GOLDS.values(), ids=GOLDS)
def test_the_marked_gold(answer, gold):
    assert marked_gold(answer) == gold


NUMBERS = ["7", "-7", "+7", "007", "1,234", "12,345,678.50", "0.5", ".5", "$15.00", "-$5", r"\$5", "3/4", "1e-3", "25%"]
NO_NUMBERS = ["", "1,23", "1,2345", "1_000", "seven", "7 eggs", "x = 7", "1/0", "(1, 2)", "--7", r"\frac{1}{2}", "٣"]


def test_what_is_a_number():
    assert [gold for gold in NUMBERS if not is_number(gold)] == []
    assert [gold for gold in NO_NUMBERS if is_number(gold)] == []
    assert is_number(7) and is_number(0.5) and not is_number(True) and not is_number([7])


def test_gsm8k_and_math_lines_become_prompts(run):
    _, prompts, _ = run(FARM, SHOP, MATH)
    assert prompts == [
        {"messages": [{"role": "user", "content": FARM["question"]}], "gt_answer": "7"},
        {"messages": [{"role": "user", "content": SHOP["question"]}], "gt_answer": "1,200"},
        {"messages": [{"role": "user", "content": "Halve $1$."}], "gt_answer": r"\frac{1}{2}", "level": "Level 1"},
    ]


def test_prompts_are_checked_and_copied(run):
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    assert run({**CHAT, "tools": tools})[1] == [{**CHAT, "tools": tools}]
    with pytest.raises(ValueError, match=r"chats.jsonl:2: turn 2, the last, is of role 'assistant'"):
        run(CHAT, {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "4"}]})


def test_fields_are_named_by_flag(run):
    line = {"id": 3, "query": "2 + 2?", "reasoning": "It is\n#### 4", "final": 5, "gt_answer": "six"}
    fields = {"question_field": "query", "answer_field": "reasoning"}
    (prompt,) = run(line, **fields)[1]
    assert (text(prompt), prompt["gt_answer"], prompt["id"], prompt["final"]) == ("2 + 2?", "4", 3, 5)
    (prompt,) = run(line, **fields, gold_field="final")[1]
    assert prompt["gt_answer"] == 5 and "final" not in prompt
    (prompt,) = run(line, question_field="query")[1]
    assert prompt["gt_answer"] == "six"
    (prompt,) = run({**CHAT, "final": "5"}, gold_field="final")[1]
    assert prompt == {**CHAT, "gt_answer": "5"}


@pytest.mark.parametrize(
    ("line", "settings", "message"),
    [
        (
            {"query": "q"},
            {},
            r"no 'question' or 'problem' \(the line's keys: 'query'\); name the field with --question",
        ),
        ({"question": "q"}, {}, r"no 'answer' or 'solution' \(.*\); name the field with --answer_field"),
        (FARM, {"gold_field": "gold"}, r"no 'gold' \(the line's keys: 'question', 'answer'\); name .* --gold_field"),
        ({"messages": CHAT["messages"]}, {}, r"no 'gt_answer' \(the line's keys: 'messages'\)"),
        ({**FARM, "question": 3}, {}, "'question' is of type int; expected text"),
        ({**FARM, "answer": 7}, {}, r"'answer' is of type int; expected text \(a bare gold: --gold_field\)"),
        ([1], {}, "the line is of type list; expected an object"),
        ('{"question": "\\ud83d", "answer": "#### 1"}', {}, r"the line holds half of a \\ud\.\.\. escape pair"),
        ("{", {}, "not JSON"),
    ],
)
def test_a_broken_line_is_named(line, settings, message, run):
    with pytest.raises(ValueError, match=rf"chats\.jsonl:3: {message}"):
        good = {**FARM, "gold": 1} if "gold_field" in settings else FARM
        run(good, "", line, **settings)


def test_lines_of_no_use_are_dropped_counted_and_named(run):
    other = {**FARM, "answer": "#### 8"}
    spaced = {**FARM, "question": " ann HAS 3 hens\nand buys 4.  How many? "}
    report, prompts, _ = run(
        FARM,
        {**FARM, "question": " "},
        {**SHOP, "answer": "1200"},
        {**SHOP, "answer": "#### a lot"},
        FARM,
        other,
        spaced,
        number_gold=True,
    )
    assert report.dropped.counts == {
        "empty question": 1,
        "no gold": 1,
        "gold is no number": 1,
        "duplicate": 2,
        "duplicate question with another gold": 1,
    }
    assert (report.num_read, len(prompts)) == (7, 1)
    shown = report.format()
    assert shown.startswith("7 read, 6 dropped: 2 duplicate (first: ")
    assert "1 gold is no number (first: " in shown and "chats.jsonl:4: 'a lot')" in shown
    assert f"1 prompts in {next(iter(report.outputs))}" in shown
    assert shown.endswith(f'first prompt:\n[user]\n{FARM["question"]}\n[gt_answer]\n"7"')


def test_golds_need_not_be_numbers_unless_asked(run):
    assert run({**SHOP, "answer": "#### a lot"})[1][0]["gt_answer"] == "a lot"
    assert run({**CHAT, "gt_answer": 0})[1][0]["gt_answer"] == 0


def test_nothing_left_is_an_error_with_the_way_out(run, tmp_path):
    with pytest.raises(ValueError, match=r"no prompt is left of 2: 2 no gold \(first: .*:1\); .* --gold_field"):
        run({**FARM, "answer": "7"}, {**SHOP, "answer": "1200"})
    assert not (tmp_path / "out").exists()


def test_instruction_and_system_message(run):
    own = {"role": "system", "content": "Be brief."}
    settings = {"instruction": "Answer with a number.", "system_message": "You are a coati."}
    _, (farm, chat), _ = run(FARM, {**CHAT, "messages": [own, *CHAT["messages"]]}, **settings)
    assert farm["messages"] == [
        {"role": "system", "content": "You are a coati."},
        {"role": "user", "content": FARM["question"] + "\n\nAnswer with a number."},
    ]
    assert chat["messages"] == [own, {"role": "user", "content": "2 + 2?\n\nAnswer with a number."}]


QUESTIONS = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(40)]


def test_held_out_prompts_are_others_and_the_same_each_time(run):
    report, train, test = run(*QUESTIONS, *QUESTIONS[:9], num_test=10)
    assert (len(train), len(test)) == (30, 10)
    assert report.dropped.counts == {"duplicate": 9}
    assert sorted([*map(text, train), *map(text, test)]) == sorted(line["question"] for line in QUESTIONS)
    assert run(*QUESTIONS, num_test=10)[1:] == (train, test)
    assert run(*QUESTIONS, num_test=10, shuffle_seed=1)[2] != test
    numbers = [numbers_of(text(prompt)) for prompt in train]
    assert numbers == sorted(numbers) != list(range(30))


def numbers_of(question):
    return int(question.split()[2])


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 10), (0.001, 1)])
def test_a_fraction_is_held_out(fraction, count, run):
    assert len(run(*QUESTIONS, test_fraction=fraction)[2]) == count


def test_some_are_left_to_train(run):
    with pytest.raises(ValueError, match="40 of 40 prompts would be held out"):
        run(*QUESTIONS, num_test=40)


def test_questions_of_an_excluded_file_are_left_out(run, tmp_path):
    settings = {"instruction": "Think."}
    run(*QUESTIONS[:7], **settings)
    excluded = tmp_path / "held.jsonl"
    (tmp_path / "out" / "prompts.jsonl").rename(excluded)
    report, train, _ = run(*QUESTIONS, exclude=(excluded,), **settings)
    assert report.dropped.counts == {"question of held.jsonl": 7}
    assert [numbers_of(text(prompt)) for prompt in train] == list(range(7, 40))


def test_shuffling_and_max_samples(run):
    in_order = run(*QUESTIONS, max_samples=5)
    assert [numbers_of(text(prompt)) for prompt in in_order[1]] == [0, 1, 2, 3, 4]
    assert "35 more left out by --max_samples" in in_order[0].format()
    shuffled = [run(*QUESTIONS, shuffle_seed=seed)[1] for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(map(text, shuffled[0])) == sorted(line["question"] for line in QUESTIONS)
    assert run(*QUESTIONS, shuffle_seed=1, max_samples=5)[1] == shuffled[0][:5]


def test_tasks_become_prompts_with_their_metadata(run):
    report, prompts, _ = run(tasks=("builtin:arithmetic",), num_samples=200, task_options={"max_number": 5})
    assert report.num_read == 200 and report.dropped.counts == {"duplicate": 200 - len(prompts)}
    assert all(prompt["gt_answer"] == str(eval(text(prompt)[8:-1])) for prompt in prompts)
    assert prompts[0]["task"] == "builtin:arithmetic" and prompts[0]["metadata"] == {"num_terms": 2}


def test_a_sum_in_another_order_is_the_same_question(run):
    _, train, test = run(tasks=("builtin:arithmetic",), num_samples=400, task_options={"max_number": 5}, num_test=9)
    questions = [text(prompt).removeprefix("What is ").removesuffix("?") for prompt in (*train, *test)]
    sums = [tuple(sorted(question.split(" + "))) for question in questions if "+" in question]
    assert len(sums) == len(set(sums)) == 21 and len(questions) == 21 + 36  # a - b is not b - a


def test_broken_lines_can_be_dropped(run):
    with pytest.raises(ValueError, match=r"\.jsonl:2: .*'question'"):
        run(FARM, {"text": "?"})
    report, prompts, _ = run(FARM, {"text": "?"}, skip_bad_lines=True)
    assert len(prompts) == 1 and report.dropped.counts == {"broken line": 1}
    assert ":2: " in report.dropped.first["broken line"]


def test_several_tasks_share_the_samples(run, monkeypatch):
    from coati_ext.dataset import tasks

    double = lambda index, seed: tasks.TaskSample(question=f"Double {index}.", gold=str(2 * index), metadata={})  # noqa: E731
    monkeypatch.setitem(tasks.BUILTIN_TASKS, "double", double)
    settings = {"tasks": ("builtin:double", "builtin:arithmetic"), "num_samples": 5}
    _, prompts, _ = run(**settings)
    assert [prompt["task"] for prompt in prompts] == ["builtin:double"] * 3 + ["builtin:arithmetic"] * 2


FILE = {"input": Path("a.jsonl")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected one of --input and --task"),
        ({**FILE, "tasks": ("builtin:arithmetic",)}, "expected one of --input and --task"),
        ({**FILE, "task_options": {"x": 1}}, "--task_options are of one task"),
        ({"tasks": ("a", "b"), "num_samples": 1}, "--num_samples is 1 for 2 tasks"),
        ({**FILE, "max_samples": 0}, "--max_samples is 0"),
        ({**FILE, "num_test": 0}, "--num_test is 0"),
        ({**FILE, "test_fraction": 1.0}, "--test_fraction is 1.0; expected more than 0 and less than 1"),
        ({**FILE, "num_test": 1, "test_fraction": 0.5}, "--num_test and --test_fraction both"),
        ({**FILE, "test_output": Path("t.jsonl")}, "nothing is held out"),
        ({"input": Path("out.jsonl")}, "out.jsonl would be read and written"),
        ({**FILE, "exclude": (Path("out_test.jsonl"),), "num_test": 1}, "out_test.jsonl would be read and written"),
        ({**FILE, "num_test": 1, "test_output": Path("./out.jsonl")}, "--output and --test_output are the same file"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(output=Path("out.jsonl"), **settings)


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts_test.jsonl"])
def test_a_file_that_exists_is_replaced_only_if_asked(name, tmp_path, write_jsonl):
    (tmp_path / name).write_text("old")
    settings = {"output": tmp_path / "prompts.jsonl", "input": Path(write_jsonl(*QUESTIONS)), "num_test": 2}
    with pytest.raises(ValueError, match=rf"{name} exists; .* --overwrite"):
        PrepareConfig(**settings)
    reader = tmp_path / "reader"
    reader.hardlink_to(tmp_path / name)  # as a process that has the old file open
    prepare(PrepareConfig(**settings, overwrite=True))
    assert "old" not in (tmp_path / name).read_text()
    assert reader.read_text() == "old"


def test_files_are_written_all_or_not_at_all(tmp_path, write_jsonl, monkeypatch):
    from coati_ext.dataset import prepared

    (tmp_path / "prompts.jsonl").write_text("old")
    config = PrepareConfig(
        output=tmp_path / "prompts.jsonl", input=Path(write_jsonl(*QUESTIONS)), num_test=20, overwrite=True
    )
    calls = iter(range(1000))

    def full_disk(*args, **kwargs):
        if next(calls) == 30:  # in the second file
            raise OSError("No space left on device")
        return json.JSONEncoder(**kwargs).encode(*args)

    monkeypatch.setattr(prepared.json, "dumps", full_disk)
    before = set(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        prepared.write_files(dict.fromkeys(config.outputs, [{"a": 1}] * 20))
    assert set(tmp_path.iterdir()) == before
    assert (tmp_path / "prompts.jsonl").read_text() == "old"
