import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from coati_ext.utils.generate import greedy_reply, load_chat_model

WORDS = ["<eos>", "<user>", "<assistant>", *(f"w{i}" for i in range(29))]
QUESTION = [{"role": "user", "content": "w3 w7"}]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """In fp32, as the references here are, also where there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def model_dir(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.update(do_sample=True, temperature=5.0)  # must not make the answer random
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def adapter_dir(model_dir, tmp_path):
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def argmax_words(model, num_words: int) -> str:
    """Greedy decoding, written out, of the question as the template renders it."""
    ids = [WORDS.index(word) for word in ["<user>", "w3", "w7", "<assistant>"]]
    start = len(ids)
    for _ in range(num_words):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] == 0:
            break
    return " ".join(WORDS[i] for i in ids[start:] if i != 0)


def test_answer_is_the_greedy_continuation_of_the_template(model_dir):
    model, tokenizer = load_chat_model(model_dir)
    answer = greedy_reply(model, tokenizer, QUESTION, max_new_tokens=7)
    assert answer == argmax_words(AutoModelForCausalLM.from_pretrained(model_dir), 7)
    assert 1 <= len(answer.split()) <= 7


def test_adapter_changes_the_answer_as_peft_does(model_dir, adapter_dir):
    base, tokenizer = load_chat_model(model_dir)
    adapted, _ = load_chat_model(model_dir, adapter=adapter_dir)
    answer = greedy_reply(adapted, tokenizer, QUESTION, max_new_tokens=7)
    assert answer == argmax_words(adapted, 7)
    assert answer != greedy_reply(base, tokenizer, QUESTION, max_new_tokens=7)


def test_adapter_with_a_tensor_missing_is_refused(model_dir, adapter_dir):
    weights = load_file(adapter_dir / "adapter_model.safetensors")
    weights.pop(next(name for name in weights if "layers.1.mlp.down_proj.lora_B" in name))
    save_file(weights, adapter_dir / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapter does not fit .*layers\.1\.mlp\.down_proj\.lora_B"):
        load_chat_model(model_dir, adapter=adapter_dir)


def test_missing_directories_are_named(model_dir, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere has no config\.json"):
        load_chat_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"nowhere has no adapter_config\.json"):
        load_chat_model(model_dir, adapter=tmp_path / "nowhere")


def test_model_without_chat_template_is_refused(model_dir):
    (model_dir / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        load_chat_model(model_dir)
