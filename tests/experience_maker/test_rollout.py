"""A rollout on a rank that has no prompts."""

from model_dir import make_model_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from coati_ext.experience_maker.rollout import Rollout
from coati_ext.models.generation import Sampling
from coati_ext.models.reward import RLVRRewardModel


def test_no_prompts_give_no_completions(tmp_path):
    base, _ = make_model_dir(tmp_path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(base)
    rollout = Rollout(AutoModelForCausalLM.from_pretrained(base), RLVRRewardModel(["number"]), tokenizer)
    sampling = Sampling(max_new_tokens=2, stop_ids=(tokenizer.eos_token_id,))
    assert rollout([], sampling, 2) == []
    prompt = {"input_ids": [5, 6], "number": 0, "gt_answer": "1", "metadata": {}, "text": "q", "source": "p.jsonl:1"}
    (group,) = rollout([prompt], sampling, 2)
    assert len(group) == 2 and all(len(completion.ids) <= 2 for completion in group)
