import pytest

from coati_ext.utils.preflight import check_expert_layout, num_experts


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_local_experts": 8}, 8),
        ({"n_routed_experts": 256, "n_shared_experts": 1}, 256),
        ({"text_config": {"num_experts": 64}}, 64),
        ({"moe_num_experts": 16}, 16),
        ({"hidden_size": 32}, 0),
        ({"num_zero_experts": 4}, None),  # a MoE, by a name that is not known: not called dense
    ],
)
def test_experts_are_counted_from_the_config(config, experts):
    assert num_experts(config) == experts


def test_dense_and_indivisible_layouts_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_expert_layout(8, 2, "mixtral")
    check_expert_layout(None, 2, "new_moe")
    with pytest.raises(ValueError, match=r"--ep 2, but the model \(llama\) is dense"):
        check_expert_layout(0, 2, "llama")
    with pytest.raises(ValueError, match="--ep 4 does not divide the model's 6 experts"):
        check_expert_layout(6, 4, "mixtral")
    with pytest.raises(ValueError, match="--ep 3 does not divide the 4 processes"):
        check_expert_layout(6, 3, "mixtral")
