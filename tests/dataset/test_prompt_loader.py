"""PromptLoader: several files as one, and a number for every prompt of a run."""

import pytest

from coati_ext.dataset.prompt_loader import PromptLoader, fingerprint_of
from coati_ext.dataset.prompts import RawPromptDataset


@pytest.fixture
def datasets(tokenizer_for, write_jsonl, tmp_path):
    def prompt(number):
        return {"messages": [{"role": "user", "content": f"question {number}"}], "gt_answer": str(number)}

    found = []
    for first, last in ((0, 3), (3, 5)):
        file = write_jsonl(*map(prompt, range(first, last)))
        found.append(RawPromptDataset(tokenizer_for("chatml"), file, 64))
    return found


def golds(items):
    return [item["gt_answer"] for item in items]


def test_files_are_one_data_set_in_their_order(datasets):
    loader = PromptLoader(datasets, 5, shuffle=False)
    assert golds(loader.next()) == ["0", "1", "2", "3", "4"]
    assert [item["number"] for item in loader.next(2)] == [5, 6]


def test_numbers_are_alike_whatever_the_number_of_ranks(datasets):
    (alone,) = ranks_of(datasets, 4, 1)
    pair = ranks_of(datasets, 2, 2)
    for _ in range(4):
        wanted = {item["number"]: item["gt_answer"] for item in alone.next()}
        assert {item["number"]: item["gt_answer"] for loader in pair for item in loader.next()} == wanted


def ranks_of(datasets, num_prompts, dp_size):
    return [PromptLoader(datasets, num_prompts, dp_rank=r, dp_size=dp_size, seed=4) for r in range(dp_size)]


def test_the_order_of_files_is_part_of_the_fingerprint(datasets):
    assert fingerprint_of(datasets[:1]) == datasets[0].fingerprint()
    assert fingerprint_of(datasets) != fingerprint_of(datasets[::-1])
