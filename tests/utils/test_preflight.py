import pytest

from coati_ext.config import ParallelConfig
from coati_ext.utils.preflight import check_layout, num_experts


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


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 6, "num_hidden_layers": 5}


@pytest.mark.parametrize(
    ("sizes", "model", "message"),
    [
        ({"ep": 2}, {"model_type": "llama"}, r"--ep 2, but the model \(llama\) is dense"),
        ({"ep": 4}, MIXTRAL, "--ep 4 does not divide the model's 6 experts"),
        ({"ep": 3}, MIXTRAL, "--ep 3 does not divide the 4 processes"),
        (
            {"ep": 2, "pp": 4},
            MIXTRAL,
            "--ep 2 x --pp 4 does not divide the 4 processes of this run; start a multiple of 8",
        ),
        ({"pp": 6}, MIXTRAL, r"--pp 6 leaves stages without a layer: the model \(mixtral\) has 5"),
        ({"pp": 2, "num_layers_per_stage": [2, 2]}, MIXTRAL, "sums to 4, but the model has 5 layers"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(monkeypatch, sizes, model, message):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=message):
        check_layout(ParallelConfig(plugin="moe", **sizes), model)


@pytest.mark.parametrize(
    ("sizes", "model"),
    [({"ep": 2, "pp": 2, "num_layers_per_stage": [2, 3]}, MIXTRAL), ({"ep": 2}, {"num_zero_experts": 6})],
)
def test_a_layout_that_fits_is_not(monkeypatch, sizes, model):
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_layout(ParallelConfig(plugin="moe", **sizes), model)
