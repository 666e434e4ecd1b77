"""Tasks: answers that are right, samples that repeat, and what reasoning-gym hands over."""

import re
import sys
import types

import pytest

from coati_ext.dataset.tasks import make_samples


@pytest.mark.parametrize(
    "options",
    [{}, {"max_number": 0}, {"num_terms": 5}, {"operations": "*-+", "num_terms": 6, "min_number": 2, "max_number": 9}],
)
def test_the_gold_of_arithmetic_is_the_value_of_the_question(options):
    numbers = range(options.get("min_number", 0), options.get("max_number", 20) + 1)
    for sample in make_samples("builtin:arithmetic", 200, 1, options):
        expression = re.fullmatch(r"What is ([0-9 +*-]+)\?", sample.question)[1]
        assert sample.gold == str(eval(expression))
        terms = [int(term) for term in re.findall("[0-9]+", expression)]
        assert len(terms) == options.get("num_terms", 2) and set(terms) <= set(numbers)
        assert set(re.findall("[-+*]", expression)) <= set(options.get("operations", "+-"))


def test_a_sample_depends_on_seed_and_index_only():
    few, many, other = (list(make_samples("builtin:arithmetic", n, seed)) for n, seed in ((5, 3), (50, 3), (50, 4)))
    assert many[:5] == few
    assert sum(a == b for a, b in zip(many, other, strict=True)) < 5
    assert many[1:] != other[:-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max": 9}, "has no option 'max'; it has min_number, max_number, num_terms, operations"),
        ({"max_number": "9"}, "option max_number is '9'; expected int"),
        ({"max_number": True}, "option max_number is True; expected int"),
        ({"min_number": 9, "max_number": 3}, "min_number is 9 and max_number 3"),
        ({"num_terms": 1}, "num_terms is 1; expected at least 2"),
        ({"operations": "+/"}, r"operations is '\+/'"),
        ({"operations": ""}, "operations is ''"),
    ],
)
def test_options_that_a_task_does_not_take_are_refused(options, message):
    with pytest.raises(ValueError, match=f"task 'builtin:arithmetic'.*{message}"):
        list(make_samples("builtin:arithmetic", 2, 0, options))


def test_an_unknown_builtin_task_names_near_ones():
    with pytest.raises(ValueError, match=r"unknown task 'builtin:arithmetics'; near names: builtin:arithmetic"):
        list(make_samples("builtin:arithmetics", 2, 0))


class FakeTask:
    """Pays an answer only if the metadata came through JSON as this kind can bear it."""

    def __init__(self, seed, size, kind="plain"):
        assert kind in ("plain", "tuples", "crash", "none"), "kind must be known"
        self.seed, self.kind = seed, kind

    def __getitem__(self, index):
        answer = None if self.kind == "none" else str(self.seed + index)
        return {"question": f"Say {self.seed + index}.", "answer": answer, "metadata": {"at": (1, 2), "i": index}}

    def score_answer(self, answer, entry):
        if self.kind == "crash":
            raise KeyError("at")
        at = entry["metadata"]["at"]
        return 1.0 if answer == entry["answer"] and (self.kind != "tuples" or isinstance(at, tuple)) else 0.01


@pytest.fixture
def fake_gym(monkeypatch):
    gym, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    gym.create_dataset = lambda name, seed, size, **options: FakeTask(seed, size, **options)
    factory.DATASETS = {"chain_sum": None, "basic_arithmetic": None, "gcd": None}
    gym.factory = factory
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def test_samples_of_reasoning_gym_keep_what_their_scorer_needs(fake_gym):
    samples = list(make_samples("chain_sum", 2, 7))
    assert [(s.question, s.gold, s.metadata) for s in samples] == [
        ("Say 7.", "7", {"at": [1, 2], "i": 0}),
        ("Say 8.", "8", {"at": [1, 2], "i": 1}),
    ]


@pytest.mark.parametrize("kind", ["tuples", "crash", "none"])
def test_a_gold_that_its_own_scorer_does_not_pay_is_none(kind, fake_gym):
    assert [sample.gold for sample in make_samples("chain_sum", 2, 7, {"kind": kind})] == [None, None]


@pytest.mark.parametrize(
    ("options", "message"), [({"kind": "x"}, "kind must be known"), ({"y": 1}, "unexpected keyword argument 'y'")]
)
def test_options_that_reasoning_gym_refuses_are_named(options, message, fake_gym):
    with pytest.raises(ValueError, match=f"task 'chain_sum' refuses its options .*{message}"):
        list(make_samples("chain_sum", 2, 0, options))


@pytest.mark.parametrize(
    ("task", "near"),
    [("chainsum", "chain_sum"), ("arithmetic", "basic_arithmetic"), ("zzz", "known are chain_sum, basic_arithmetic")],
)
def test_an_unknown_task_of_reasoning_gym_lists_names(task, near, fake_gym):
    with pytest.raises(ValueError, match=f"unknown task {task!r}; .*{near}"):
        list(make_samples(task, 2, 0))


def test_a_missing_reasoning_gym_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"task 'chain_sum' is made by the package reasoning-gym.*run: pip install"):
        list(make_samples("chain_sum", 2, 0))


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "basic_arithmetic", "knights_knaves", "countdown"])
def test_the_real_reasoning_gym_makes_and_scores(task):
    gym = pytest.importorskip("reasoning_gym", exc_type=ImportError)
    samples = list(make_samples(task, 5, 3))
    scorer = gym.create_dataset(task, seed=3, size=5)
    for sample in samples:
        entry = {"question": sample.question, "answer": sample.gold, "metadata": sample.metadata}
        assert scorer.score_answer(sample.gold, entry) == 1
        assert scorer.score_answer("no", entry) < 1
