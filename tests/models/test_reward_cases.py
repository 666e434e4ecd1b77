"""The verdicts of `tests/assets/grader_cases.jsonl`, and what must hold for each of them wherever it is graded."""

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coati_ext.models.reward_score import find_reward

FILE = Path(__file__).parents[1] / "assets" / "grader_cases.jsonl"
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").split("\n") if line]
# One of each kind and verdict, for the slower comparisons.
SAMPLE = list({(case["reward"], case["reason"]): case for case in CASES}.values())


def needs_math_verify(case):
    return case["reward"].startswith(("math", "boxed_math"))


def verdict(case):
    score = find_reward(case["reward"])(case["completion"], case["gold"], **case["settings"])
    return score.reason, score.score


def name(case):
    return f"{CASES.index(case) + 1}-{case['reward']}-{case['why']}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_case(case):
    if needs_math_verify(case):
        pytest.importorskip("math_verify")
    score = find_reward(case["reward"])(case["completion"], case["gold"], **case["settings"])
    assert score.reason == case["reason"]
    assert score.score == (None if case["score"] is None else pytest.approx(case["score"]))
    if case["reward"] not in ("overlong", "target_length"):
        assert score.accuracy == (None if case["score"] is None else float(case["reason"] == "correct"))


def test_a_gold_is_its_own_right_answer():
    golds = {
        (case["reward"], json.dumps(case["gold"])): case
        for case in CASES
        if case["reason"] == "correct" and case["reward"] in ("number", "math", "multiple_choice", "exact_match")
    }
    assert len(golds) > 40
    for case in golds.values():
        if needs_math_verify(case):
            pytest.importorskip("math_verify")
        gold = str(case["gold"])
        completion = gold if "####" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}"
        assert find_reward(case["reward"])(completion, case["gold"]).reason == "correct", case


def test_the_verdict_is_the_same_in_a_thread_and_in_a_process():
    cases = SAMPLE
    try:
        import math_verify  # noqa: F401
    except ImportError:
        cases = [case for case in SAMPLE if not needs_math_verify(case)]
    expected = [(case["reason"], case["score"]) for case in cases]
    with ThreadPoolExecutor(3) as executor:
        assert list(executor.map(verdict, cases)) == expected
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        assert processes.map(verdict, cases) == expected


def test_the_file_covers_every_reason_and_no_case_twice():
    assert {case["reason"] for case in CASES} == {
        "correct",
        "wrong",
        "no_answer",
        "bad_format",
        "gold_unparseable",
        "timeout",
        "truncated",
        "unjudged",
    }
    inputs = [json.dumps([case[key] for key in ("reward", "completion", "gold", "settings")]) for case in CASES]
    assert len(set(inputs)) == len(inputs) >= 200
