import json

import pytest

from coati_ext.utils.summary import format_summary, summarise


def make_run(folder, *, losses=(4.0, 3.0, 2.0), passed=True, diff=5e-5):
    (folder / "upcycle.json").write_text(json.dumps({"max_logit_diff": diff}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in losses))
    report = {"max_logit_diff": 1e-6, "tensors_applied": 720, "tensors_missing": [], "passed": passed}
    (folder / "verify.json").write_text(json.dumps(report))
    return summarise(folder, question="Q?", before="no", after="yes", seconds=12.34)


def test_a_good_run(tmp_path):
    summary = make_run(tmp_path)
    named = {"upcycle_max_logit_diff", "loss_first", "loss_last", "adapter_max_logit_diff", "tensors_applied"}
    assert named | {"tensors_missing", "seconds"} <= summary.keys()
    assert (summary["loss_first"], summary["loss_last"], summary["tensors_missing"]) == (4.0, 2.0, 0)
    assert summary["problems"] == [] and "PROBLEM" not in format_summary(summary)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"passed": False}, "did not verify"),
        ({"diff": 0.5}, "logits differ"),
        ({"losses": [3.0] * 12}, "did not fall"),
        ({"losses": [3.0] * 11 + [float("nan")]}, "did not fall"),
    ],
)
def test_what_went_wrong_is_named(tmp_path, bad, problem):
    summary = make_run(tmp_path, **bad)
    assert len(summary["problems"]) == 1 and problem in summary["problems"][0]
    assert problem in format_summary(summary)


def test_losses_are_of_steps_that_were_taken(tmp_path):
    make_run(tmp_path)
    metrics, skipped = tmp_path / "metrics.jsonl", json.dumps({"loss": None, "skipped": "the loss is nan"}) + "\n"
    metrics.write_text(skipped + metrics.read_text() + skipped)
    summary = summarise(tmp_path, question="", before="", after="", seconds=0)
    assert (summary["loss_first"], summary["loss_last"]) == (4.0, 2.0)
    metrics.write_text(skipped)
    with pytest.raises(ValueError, match="no step was trained"):
        summarise(tmp_path, question="", before="", after="", seconds=0)


def test_a_step_that_did_not_run_is_named(tmp_path):
    make_run(tmp_path)
    (tmp_path / "verify.json").unlink()
    with pytest.raises(ValueError, match=r"verify\.json is missing"):
        summarise(tmp_path, question="", before="", after="", seconds=0)
