"""The GRPO benchmark measures each engine on the same work, and says so where it was not the same."""

import importlib.util
import json
import statistics

import pytest
from model_dir import make_model_dir
from transformers import GenerationConfig

from applications.benchmark import main
from coati_ext.benchmark import grpo

NUM_PROMPTS, NUM_GENERATIONS, MAX_SEQ_LEN, STEPS, WARMUP = 3, 4, 9, 3, 2
SIZES = dict(num_generations=NUM_GENERATIONS, max_seq_len=MAX_SEQ_LEN, batch_size=4, steps=STEPS, warmup=WARMUP)
HAS_TRL = importlib.util.find_spec("trl") is not None


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(Model directory, prompt JSONL), prompts of several lengths; a quarter of the tokens would end a completion."""
    folder = tmp_path_factory.mktemp("grpo")
    base, _ = make_model_dir(folder, "llama")
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    GenerationConfig(eos_token_id=list(range(1, vocabulary, 4))).save_pretrained(base)
    prompts = folder / "prompts.jsonl"
    questions = [{"messages": [{"role": "user", "content": "What" * n}], "gt_answer": "1"} for n in (1, 3, 6, 8)]
    prompts.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return base, prompts


def flags(files, **changed):
    base, prompts = files
    given = {"pretrained": base, "prompt_dataset": prompts, "num_prompts": NUM_PROMPTS, "lora_rank": 4, **SIZES}
    return ["grpo", *(part for name, value in {**given, **changed}.items() for part in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def report(files):
    out = files[1].with_name("report.json")
    engines = ["ours", "trl"] if HAS_TRL else ["ours"]
    assert main([*flags(files, json=out), "--engines", *engines]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "engine", ["ours", pytest.param("trl", marks=pytest.mark.skipif(not HAS_TRL, reason="no trl"))]
)
def test_every_step_is_the_whole_work(report, engine):
    found = report["engines"][engine]
    assert len(found["steps"]) == STEPS
    rows = NUM_PROMPTS * NUM_GENERATIONS
    for step in found["steps"]:
        assert step["num_generated"] == rows * MAX_SEQ_LEN
        assert step["num_trained"] > step["num_generated"]
        assert step["generate"] > 0 and step["update"] > 0
        assert sum(step[phase] for phase in grpo.PHASES) <= step["step"]
    assert found["samples_per_s"] == pytest.approx(rows / statistics.median(s["step"] for s in found["steps"]))
    assert found["num_trained_parameters"] == 14848 // 4  # of rank 16, in the table of `LoRA on`
    assert found["peak_bytes"] == found["peaks"]["host"] > 1e8


@pytest.mark.skipif(not HAS_TRL, reason="no trl")
def test_the_ratios_are_ours_over_theirs(report):
    own, other = report["engines"]["ours"], report["engines"]["trl"]
    assert own["num_trained_tokens"] == other["num_trained_tokens"]
    assert report["ratios"] == {"trl": {key: pytest.approx(own[key] / other[key]) for key in report["ratios"]["trl"]}}


@pytest.mark.skipif(not HAS_TRL, reason="no trl")
def test_continuous_batching_generates_as_many_tokens(files, capsys):
    small = flags(files, num_prompts=1, steps=1, warmup=1)
    assert main([*small, "--engines", "trl_continuous"]) == 0
    assert "trl_continuous" in capsys.readouterr().out


def result(step_seconds=2.0, **changed):
    log = grpo.StepLog()
    log.rows = [
        {"step": seconds, "generate": 0.5, "score": 0.0, "log_probs": 0.1, "update": 0.3, "num_generated": 12 * 9,
         "num_trained": 200, **changed}
        for seconds in (100.0, step_seconds, step_seconds + 1, step_seconds + 5)
    ]  # fmt: skip
    return grpo.measured(work(), log, num_trained_parameters=7)


def work(**changed):
    return grpo.Workload(pretrained="base", prompts=([], [], []), **{**SIZES, **changed})


def test_warm_up_is_left_out_and_the_rest_are_medians():
    found = result()  # of 2 + 3 steps the first has no beginning, and the second took 100 s
    assert found["seconds"] == pytest.approx(
        {"step": 3.0, "generate": 0.5, "score": 0.0, "log_probs": 0.1, "update": 0.3, "other": 2.1}
    )
    assert found["samples_per_s"] == pytest.approx(12 / 3)
    assert found["generation_tokens_per_s"] == pytest.approx(12 * 9 / 0.5)
    assert found["training_tokens_per_s"] == pytest.approx(200 / 0.4)


def test_a_completion_that_ended_early_is_an_error():
    with pytest.raises(ValueError, match="a step generated 107 tokens, expected 108"):
        result(num_generated=12 * 9 - 1)


def test_unlike_work_has_no_ratios(monkeypatch):
    results = {"ours": result(), "trl": result(num_trained=201)}
    monkeypatch.setattr(grpo, "in_own_process", lambda function, name, workload: results[name])
    report = grpo.compare(work(), ["ours", "trl"])
    assert report["ratios"] == {}
    assert "num_trained_tokens is {'ours': 200, 'trl': 201}" in report["failed"]["comparison"]
    assert "comparison failed" in grpo.table(report)


def test_an_engine_that_fails_leaves_the_others_their_results(monkeypatch):
    def run(function, name, workload):
        if name == "trl":
            raise RuntimeError("out of memory")
        return result(4.0 if name == "trl_continuous" else 2.0)

    monkeypatch.setattr(grpo, "in_own_process", run)
    report = grpo.compare(work(), ["ours", "trl", "trl_continuous"])
    assert report["failed"] == {"trl": "RuntimeError: out of memory"}
    assert report["ratios"]["trl_continuous"]["samples_per_s"] == pytest.approx(5 / 3)
    shown = grpo.table(report)
    assert "trl failed: RuntimeError: out of memory" in shown
    assert "ours/trl_continuous" in shown and "1.67" in shown


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"batch_size": 5}, "--batch_size 5 does not divide the 12 completions"),
        ({"num_generations": 1}, "--num_generations must be at least 2, got 1"),
        ({"warmup": 0}, "--warmup must be at least 1, got 0"),
        ({"num_prompts": 5}, "prompts.jsonl has 4 prompts"),
        ({"num_prompts": 0}, "--num_prompts must be at least 1"),
        ({"engines": "theirs"}, "--engines theirs: expected some of ours, trl, trl_continuous"),
    ],
)
def test_what_cannot_be_measured_is_refused(files, changed, message, capsys):
    assert main([*flags(files, engines="ours"), *flags(files, **changed)[1:]]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("found, message", [(None, "trl is not installed; pip install"), ("1.9.0", "trl is 1.9.0")])
def test_trl_missing_or_of_another_version_is_refused(found, message, files, monkeypatch):
    monkeypatch.setattr(grpo, "installed", lambda name: found)
    with pytest.raises(ValueError, match=f"--engines trl: {message}"):
        grpo.check_engines(["ours", "trl"], str(files[0]))
    grpo.check_engines(["ours"], str(files[0]))


def test_a_mixture_of_experts_is_for_ours_alone(tmp_path, monkeypatch):
    base, _ = make_model_dir(tmp_path, "mixtral")
    monkeypatch.setattr(grpo, "installed", lambda name: "1.16.0")
    with pytest.raises(ValueError, match="has experts"):
        grpo.check_engines(["ours", "trl"], str(base))
    grpo.check_engines(["ours"], str(base))
