"""The streaming loader onto a GPU: the CPU's bits, within the memory of the model and of the strips."""

from pathlib import Path

import pytest
import torch
from fp8_checkpoint import make_fp8_dir
from tiny_models import tiny_model

from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import build_meta_model, load_weights

pytestmark = pytest.mark.gpu


def tensors_on(device: str, directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = build_meta_model(directory, dtype)
    load_weights(model, directory, Layout(), 0, device=device, num_workers=4)
    return model.state_dict() | dict(model.named_buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_a_gpu_gets_what_a_cpu_gets(fp8, dtype, tmp_path):
    if fp8:
        make_fp8_dir(tmp_path / "in")
    else:
        tiny_model("mixtral").save_pretrained(tmp_path / "in")
    expected, found = (tensors_on(device, tmp_path / "in", dtype) for device in ("cpu", "cuda"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].is_cuda, name
        assert torch.equal(found[name].cpu(), tensor), name


def test_device_memory_is_that_of_the_model_and_of_the_strips(tmp_path):
    sizes = dict(vocab_size=1 << 20, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    tiny_model("llama", **sizes, tie_word_embeddings=True).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    model = build_meta_model(tmp_path, torch.float32)
    load_weights(model, tmp_path, Layout(), 0, device="cuda", num_workers=2)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    strips = 2 * 64 << 20  # of fp32, a worker
    assert torch.cuda.max_memory_reserved() - before < nbytes + strips + (40 << 20)
