"""Caches cut, repeated and joined, against the tensors they should hold; layers of all kinds that rows are kept in."""

import pytest
import torch
from tiny_models import tiny_model, token_batch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from coati_ext.models.kv_cache import GrowingLayer, adopt_cache, join_caches, select_rows


def step_states(seed: int, columns: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, columns, 4, generator=generator), torch.randn(3, 2, columns, 5, generator=generator)


def test_a_growing_layer_holds_what_transformers_layer_holds():
    ours, theirs = GrowingLayer(), DynamicLayer()
    for step in range(60):
        states = step_states(step, 7 if step == 0 else 1)
        for found, expected in zip(ours.update(*states), theirs.update(*states), strict=True):
            assert torch.equal(found, expected)
        if step == 30:  # other rows are put in place of the layer's
            index = torch.tensor([2, 0, 1])
            ours.reorder_cache(index)
            theirs.reorder_cache(index)
    assert ours.get_seq_length() == 66


def test_a_growing_layer_seldom_moves():
    layer, places = GrowingLayer(), []
    for step in range(200):
        layer.update(*step_states(step))
        places.append(layer.keys.shape[-2] <= layer.room["keys"].shape[-2] and layer.room["keys"].shape[-2])
    assert len(set(places)) < 15


@pytest.mark.parametrize("family", ["llama", "deepseek_v32", "exaone_moe", "qwen3_next", "minimax"])
def test_joined_and_selected_rows_go_on_as_they_would_have(family):
    model, ids_BS = tiny_model(family), token_batch(3, 8)

    @torch.no_grad()
    def filled(rows: torch.Tensor):
        return adopt_cache(model(rows, use_cache=True).past_key_values, "model")

    @torch.no_grad()
    def next_logits(cache, index: list[int]) -> torch.Tensor:
        position = torch.full((len(index), 1), 8)
        return model(ids_BS[index, :1], past_key_values=cache, position_ids=position, use_cache=True).logits

    joined = join_caches([filled(ids_BS[:1]), filled(ids_BS[1:])])
    index = [2, 0, 2, 1]
    select_rows(joined, torch.tensor(index))
    torch.testing.assert_close(next_logits(joined, index), next_logits(filled(ids_BS[index]), index), rtol=0, atol=1e-5)


def test_a_cache_of_an_unknown_class_is_refused_by_name():
    with pytest.raises(ValueError, match="Model returned tuple for a cache"):
        adopt_cache(((),), "Model")
    cache = DynamicCache()
    cache.layers.append(StaticLayer(max_cache_len=4))
    with pytest.raises(ValueError, match="Model caches in a StaticLayer"):
        adopt_cache(cache, "Model")


@pytest.mark.parametrize("family", ["llama", "deepseek_v32", "exaone_moe", "wide_window", "qwen3_next"])
def test_dropping_padding_on_the_left_changes_nothing(family):
    model = tiny_model("exaone_moe", sliding_window=12) if family == "wide_window" else tiny_model(family)
    rows, pads = [token_batch(1, length, seed=length)[0] for length in (4, 6)], [4, 2]
    ids_BS = torch.stack([torch.cat([torch.zeros(pad).long(), row]) for pad, row in zip(pads, rows, strict=True)])
    mask_BS = (torch.arange(8) >= torch.tensor(pads)[:, None]).long()
    position_BS = (torch.arange(8) - torch.tensor(pads)[:, None]).clamp(min=0)
    with torch.no_grad():
        output = model(ids_BS, attention_mask=mask_BS, position_ids=position_BS, use_cache=True)
        cache = adopt_cache(output.past_key_values, "model")
        select_rows(cache, torch.tensor([1, 0]), drop=2)
        assert cache.get_seq_length() == 6
        tokens_B1, mask_BS = torch.tensor([[7], [8]]), (torch.arange(7) >= torch.tensor([[0], [2]])).long()
        for step in range(2):
            logits = model(
                tokens_B1,
                attention_mask=torch.cat([mask_BS, torch.ones(2, step).long()], 1),
                position_ids=torch.tensor([[6], [4]]) + step,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        for logits_V, row, token in zip(logits, (rows[1], rows[0]), (7, 8), strict=True):
            whole = torch.cat([row, torch.tensor([token, token])])
            expected_V = model(whole[None], use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits_V, expected_V, rtol=0, atol=1e-5)
