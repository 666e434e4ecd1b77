"""ConversationCollator: right padding, masks from lengths, the empty batch."""

import pytest
import torch

from coati_ext.dataset import ConversationCollator


def sample(*ids, supervised):
    labels = [token if i >= len(ids) - supervised else -100 for i, token in enumerate(ids)]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def test_samples_are_padded_on_the_right_to_the_longest():
    batch = ConversationCollator(9)([sample(1, 2, 3, supervised=2), sample(4, supervised=0)])
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[1, 2, 3], [4, 9, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[-100, 2, 3], [-100, -100, -100]],
    }
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_a_real_token_equal_to_the_pad_token_stays_supervised_and_attended():
    batch = ConversationCollator(7)([sample(1, 7, 7, supervised=2), sample(1, supervised=0)])
    assert batch["labels"][0].tolist() == [-100, 7, 7]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("length", "multiple", "padded"), [(1, 8, 8), (8, 8, 8), (9, 8, 16), (3, 1, 3), (5, 3, 6)])
def test_the_length_is_rounded_up(length, multiple, padded):
    batch = ConversationCollator(0, pad_to_multiple_of=multiple)([sample(*[5] * length, supervised=1)])
    assert batch["input_ids"].shape == (1, padded)
    assert int(batch["attention_mask"].sum()) == length


@pytest.mark.parametrize("multiple", [1, 8])
def test_an_empty_batch_is_one_unsupervised_token(multiple):
    batch = ConversationCollator(9, pad_to_multiple_of=multiple)([])
    assert {key: value.shape for key, value in batch.items()} == dict.fromkeys(batch, (1, multiple))
    assert batch["input_ids"].unique().tolist() == [9]
    assert batch["attention_mask"].tolist() == [[1] + [0] * (multiple - 1)]
    assert batch["labels"].unique().tolist() == [-100]


def test_the_pad_token_is_the_tokenizers_or_else_its_eos(tokenizer_for):
    tokenizer = tokenizer_for("chatml")
    assert tokenizer.pad_token_id is None
    assert ConversationCollator(tokenizer).pad_token_id == tokenizer.eos_token_id
    tokenizer.pad_token = "<|im_start|>"
    assert ConversationCollator(tokenizer).pad_token_id == tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.pad_token = tokenizer.eos_token = None
    assert ConversationCollator(tokenizer).pad_token_id == 0


def test_a_multiple_below_one_is_refused():
    with pytest.raises(ValueError, match="pad_to_multiple_of is 0; expected at least 1"):
        ConversationCollator(0, pad_to_multiple_of=0)
