import time

import numpy
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from coati_ext.models.reward import RewardModel, RLVRRewardModel
from coati_ext.models.reward_score import REWARDS, Score, add_scores, find_reward, reason_rates
from coati_ext.models.reward_score.score import graded, not_scorable

TAGS = {
    "answer_start": {"text": "<answer>", "num_occur": 1},
    "answer_end": {"text": "</answer>", "num_occur": 1},
}


def slow(completion, gold, *, deadline_s=5.0):
    time.sleep(0.02 * (7 - int(completion)))
    return int(completion)


def length_of(completion, gold):
    return len(completion)


def says_nothing(completion, gold):
    return None


def leaves(completion, gold):
    raise SystemExit(0)


def fails(completion, gold):
    raise KeyError("gone")


def test_rewards_are_summed_with_their_weights_and_named_parts():
    model = RLVRRewardModel(["gsm8k", "overlong"], weights=[1.0, 2.0], max_length=100, soft_zone=20)
    scores = model(["#### 42", "#### 41", "none"], ["42"] * 3, lengths=[10, 90, 100])
    assert [score.score for score in scores] == [10.0, 0.0, -2.0]
    assert scores[1].parts == {"gsm8k/format": 1.0, "gsm8k/answer": 0.0, "overlong/overlong": -1.0}
    assert [score.accuracy for score in scores] == [1.0, 0.0, 0.0]
    assert [score.reason for score in scores] == ["correct", "wrong", "no_answer"]


def test_slow_rewards_run_in_parallel_and_keep_the_order():
    model = RLVRRewardModel([slow], num_workers=4)
    began = time.monotonic()
    scores = model([str(i) for i in range(8)], [None] * 8)
    assert [score.score for score in scores] == list(range(8))
    assert time.monotonic() - began < 0.4  # one after the other: 0.56


def test_tags_and_truncation_reach_the_rewards_that_take_them():
    model = RLVRRewardModel(["number", length_of], tags=TAGS)
    scores = model(["<answer>4</answer>", "<answer>4"], ["4", "4"], truncated=[False, True])
    assert [score.reason for score in scores] == ["correct", "truncated"]
    assert [score.score for score in scores] == [28.0, 9.0]


def test_a_sample_that_one_reward_cannot_score_has_no_score():
    scores = RLVRRewardModel(["number", length_of])(["#### 4", "#### 4"], ["4", None])
    assert scores[1] == Score(score=None, accuracy=None, parts={}, reason="gold_unparseable")
    assert scores[0].score == 16.0
    said = RLVRRewardModel([says_nothing])(["x"], ["y"])[0]
    assert said.score is None and said.reason == "not_scorable"


def test_a_reward_that_ends_the_process_is_an_error_too():
    """Else the command would end with status 0 and without a result."""
    with pytest.raises(RuntimeError, match="reward leaves failed on sample 0: SystemExit"):
        RLVRRewardModel([leaves])(["x"], ["y"])


def test_a_reward_that_fails_is_an_error_that_names_it_and_the_sample():
    with pytest.raises(RuntimeError, match="reward fails failed on sample 0: KeyError: 'gone'"):
        RLVRRewardModel([fails])(["x"], ["y"])
    with pytest.raises(RuntimeError, match=r"failed on sample 0 \(p.jsonl:7\): KeyError"):
        RLVRRewardModel([fails])(["x"], ["y"], sources=["p.jsonl:7"])


def test_a_number_that_is_not_finite_is_an_error():
    with pytest.raises(RuntimeError, match="expected a finite number"):
        RLVRRewardModel([lambda completion, gold: float("nan")])(["x"], ["y"])


def test_a_text_is_no_number():
    with pytest.raises(RuntimeError, match="it returned the text '5'"):
        RLVRRewardModel([lambda completion, gold: "5"])(["x"], ["y"])


@pytest.mark.parametrize("kind", [numpy.bool_, torch.tensor])
def test_a_bool_of_numpy_or_torch_is_an_accuracy_too(kind):
    score = RLVRRewardModel([lambda completion, gold: kind(completion == gold)])(["x"], ["x"])[0]
    assert (score.score, score.accuracy) == (1.0, 1.0)


def test_what_a_reward_changes_of_its_arguments_changes_no_other_completion():
    def takes(completion, gold, metadata):
        metadata["seen"] = metadata.get("seen", 0) + 1
        return gold.pop() * metadata["seen"]

    gold, metadata = [4], {}
    scores = RLVRRewardModel([takes])(["x", "y"], [gold, gold], metadata=[metadata, metadata])
    assert [score.score for score in scores] == [4.0, 4.0]
    assert gold == [4] and metadata == {}


def test_a_bool_is_an_accuracy_too():
    score = RLVRRewardModel([lambda completion, gold: completion == gold])(["x"], ["x"])[0]
    assert (score.score, score.accuracy, score.reason) == (1.0, 1.0, "correct")


def test_rewards_are_found_by_name_and_by_dotted_path():
    for path in (
        "coati_ext.models.reward_score.number:number_reward",
        "coati_ext.models.reward_score.number.number_reward",
    ):
        assert find_reward(path) is REWARDS["number"]
        assert RLVRRewardModel([path])(["#### 4"], ["4"])[0].score == 10.0


@pytest.mark.parametrize(
    "name, message",
    [
        ("gsm", "unknown reward 'gsm'; expected one of number, gsm8k"),
        ("no_such_module:f", "there is no module no_such_module"),
        ("json.no_such_module.f", "there is no module json.no_such_module"),
        ("json:no_such", "json has no function no_such"),
        ("json:__name__", "has no function __name__"),
        (":f", "unknown reward ':f'"),
    ],
)
def test_an_unknown_reward_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_reward(name)


def test_an_import_error_inside_a_reward_s_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        find_reward("my_reward:f")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(reward_functions=[]), "at least one reward"),
        (dict(reward_functions="gsm8k"), "expected a list"),
        (dict(reward_functions=["gsm8k", "gsm8k"]), "gsm8k is there twice"),
        (dict(reward_functions=["number", "gsm8k"]), "gsm8k is there twice, if under another name"),
        (dict(reward_functions=[3]), "holds 3"),
        (dict(reward_functions=["gsm8k"], weights=[1, 2]), "expected 1 finite numbers"),
        (dict(reward_functions=["gsm8k"], weights=[float("nan")]), "expected 1 finite"),
        (
            dict(reward_functions=["gsm8k"], soft_zone=3),
            "no reward of gsm8k takes 'soft_zone'; they take correct_score",
        ),
        (dict(reward_functions=["gsm8k"], deadline_s=3), "takes 'deadline_s'"),
        (dict(reward_functions=[length_of], tags=TAGS), "takes 'tags'; they take none"),
        (dict(reward_functions=["overlong"], soft_zone=3), "overlong needs the setting max_length"),
        (
            dict(reward_functions=["number"], correct_score="abc"),
            "correct_score of the reward number is 'abc'; expected a n",
        ),
        (dict(reward_functions=["number"], format_score=None), "format_score of the reward number is None"),
        (dict(reward_functions=["number"], format_score=True), "format_score of the reward number is True"),
        (
            dict(reward_functions=["math"], extraction="lax"),
            "extraction of .* is 'lax'; expected 'strict' or 'flexible'",
        ),
        (dict(reward_functions=["code"], deadline_s=0), "deadline_s is 0"),
        (dict(reward_functions=["code"], num_workers=0), "num_workers is 0"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        RLVRRewardModel(**arguments)


def test_lists_of_unlike_lengths_and_missing_lengths_are_refused():
    model = RLVRRewardModel(["overlong"], max_length=8, soft_zone=2)
    with pytest.raises(ValueError, match="golds has 1 entries for 2 completions"):
        model(["a", "b"], [None], lengths=[1, 2])
    with pytest.raises(ValueError, match="lengths has 1 entries"):
        model(["a", "b"], [None, None], lengths=[1])
    with pytest.raises(ValueError, match="overlong needs the length"):
        model(["a"], [None])
    assert model([], [], lengths=[]) == []


def takes_all(completion, gold, **keywords):
    return float(keywords["bonus"] + keywords["metadata"]["level"] + keywords["length"])


def test_a_function_with_any_keywords_is_given_all():
    model = RLVRRewardModel([takes_all], bonus=10)
    assert [score.score for score in model(["a"], [None], lengths=[2], metadata=[{"level": 5}])] == [17.0]


def test_a_number_is_no_verdict_and_a_bool_is():
    scores = RLVRRewardModel([lambda completion, gold: completion == gold])(["4", "5"], ["4", "4"])
    assert [(score.reason, score.accuracy) for score in scores] == [("correct", 1.0), ("wrong", 0.0)]
    (number,) = RLVRRewardModel([lambda completion, gold: 0.45])(["4"], ["4"])
    assert (number.reason, number.accuracy) == ("unjudged", None)


def test_rates_name_every_reason_and_what_was_left_out():
    scores = [not_scorable("timeout"), graded("wrong", format_score=1.0, correct_score=10.0)] * 2
    rates = reason_rates(scores)
    assert rates == {
        "correct": 0.0,
        "wrong": 0.5,
        "no_answer": 0.0,
        "bad_format": 0.0,
        "gold_unparseable": 0.0,
        "not_scorable": 0.0,
        "timeout": 0.5,
        "truncated": 0.0,
        "unjudged": 0.0,
        "unscored": 0.5,
    }
    assert set(reason_rates([]).values()) == {0.0}


def test_the_worst_reason_and_the_least_accuracy_are_those_of_a_sum():
    right, wrong = (graded(reason, format_score=1.0, correct_score=10.0) for reason in ("correct", "wrong"))
    total = add_scores({"a": right, "b": wrong}, [1.0, 0.5])
    assert (total.score, total.accuracy, total.reason) == (10.5, 0.0, "wrong")


@pytest.mark.parametrize(
    "fields",
    [
        dict(score=1.0, accuracy=1.0, parts={"a": 2.0}, reason="correct"),
        dict(score=float("inf"), accuracy=1.0, parts={"a": float("inf")}, reason="correct"),
        dict(score=None, accuracy=None, parts={"a": 0.0}, reason="timeout"),
        dict(score=0.0, accuracy=0.0, parts={}, reason="right"),
    ],
)
def test_a_score_that_contradicts_itself_is_refused(fields):
    with pytest.raises(ValueError):
        Score(**fields)


@pytest.fixture
def reward_checkpoint(tmp_path):
    def make(num_labels=1):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = {word: i for i, word in enumerate(["<eos>", "<unk>", *"abcdefgh"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(
            tmp_path
        )
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=12,
            num_labels=num_labels,
        )
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
        return tmp_path

    return make


def test_a_reward_model_scores_pairs_alike_in_any_batch(reward_checkpoint):
    directory = reward_checkpoint()
    prompts, completions = ["a", "ab", "abc", "h", "a"], ["b", "cdefg", "d", "", "c"]
    one = RewardModel(directory, batch_size=1, device="cpu")(prompts, completions)
    several = RewardModel(directory, batch_size=3, device="cpu")(prompts, completions)
    assert several == pytest.approx(one, abs=1e-5)
    assert len({round(score, 4) for score in one}) == 5 and all(isinstance(score, float) for score in one)


def test_a_reward_model_is_the_classifier_s_logit(reward_checkpoint):
    directory = reward_checkpoint()
    classifier = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = classifier(input_ids=torch.tensor([[2, 3, 4]])).logits.item()
    assert RewardModel(directory, device="cpu")(["ab"], ["c"]) == [pytest.approx(expected, abs=1e-6)]


def test_a_long_pair_loses_its_beginning(reward_checkpoint):
    model = RewardModel(reward_checkpoint(), device="cpu", max_length=4)
    assert model(["aaaaab"], ["cde"]) == pytest.approx(model(["b"], ["cde"]))


def test_a_model_that_is_no_reward_model_is_refused(reward_checkpoint):
    with pytest.raises(ValueError, match="has num_labels 3; a reward model has a head of 1"):
        RewardModel(reward_checkpoint(num_labels=3), device="cpu")


def test_a_head_without_weights_is_refused(reward_checkpoint):
    from safetensors.torch import load_file, save_file

    directory = reward_checkpoint()
    tensors = load_file(directory / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for score\.weight"):
        RewardModel(directory, device="cpu")
