"""In every layout the loss of a plain head is made without the logits of all tokens, and is that of one process."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from distributed import pool
from parity import reference, run_layout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coati_ext.models import lm_head
from coati_ext.trainer.sft import SFTTrainer

CHUNK_SIZE = 4  # tokens; every micro-batch below has more that are supervised
WORDS = 187  # of the models here: no other tensor has as many columns, nor as many as one of two uneven slices
SLICES = (94, 93)
TIED = {"model_kwargs": {"tie_word_embeddings": True, "vocab_size": WORDS}}

LAYOUTS = {  # name: (processes, family, settings of run_layout)
    "one process": (1, "mixtral", {}),
    "one process, trained head": (1, "llama", {"train_head": True}),
    "ep 2": (2, "mixtral", {"ep": 2}),
    "ep 2, ZeRO 2": (2, "mixtral", {"ep": 2, "zero_stage": 2}),
    "pp 2": (2, "mixtral", {"pp": 2, "microbatch_size": 2}),
    "pp 2, packing": (2, "mixtral", {"pp": 2, "packing": True}),
    "pp 2, tied": (2, "mixtral", {"pp": 2, "microbatch_size": 2, **TIED}),
    "pp 2, trained head": (2, "mixtral", {"pp": 2, "microbatch_size": 2, "train_head": True}),
    "sp 2": (2, "mixtral", {"sp": 2}),
    "sp 2, trained head": (2, "mixtral", {"sp": 2, "train_head": True}),
    "tp 2": (2, "llama", {"tp": 2}),
    "tp 2, tied": (2, "llama", {"tp": 2, **TIED}),
    "tp 2, trained head": (2, "llama", {"tp": 2, "train_head": True}),
    "tp 2, split_gather": (2, "llama", {"tp": 2, "sequence_parallel": True}),
    "tp 2 x pp 2, trained head": (4, "llama", {"tp": 2, "pp": 2, "microbatch_size": 2, "train_head": True}),
}


class LargestLogits(TorchDispatchMode):
    """Notes the most rows of any tensor that has a column for each word, or for each of a slice of them."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self.num_rows = 0
        self.weights = {p.untyped_storage().data_ptr() for p in parameters}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.shape[-1:].numel() in (WORDS, *SLICES):
                is_weight = tensor.untyped_storage().data_ptr() in self.weights
                self.num_rows = max(self.num_rows, 0 if is_weight else tensor.numel() // tensor.shape[-1])
        return result


def run_watched(family: str, settings: dict, chunk_size: int = CHUNK_SIZE):
    """What `run_layout` gives, and the largest logits of its training step on this rank."""
    train_step, largest = SFTTrainer.train_step, []

    def watched(trainer, batches):
        with LargestLogits(list(trainer.model.parameters())) as seen:
            if settings.get("zero_stage") == 2:  # which looks for values that are not finite by a forward alone
                trainer._do_again([trainer._mine(batch) for batch in batches])
            result = train_step(trainer, batches)
        largest.append(seen.num_rows)
        return result

    settings = {"ep": 1, "accumulation_steps": 2, "model_kwargs": {"vocab_size": WORDS}, **settings}
    in_chunks = partial(lm_head.linear_cross_entropy, chunk_size=chunk_size)
    with patch.object(SFTTrainer, "train_step", watched), patch.object(lm_head, "linear_cross_entropy", in_chunks):
        return *run_layout(family, ["all"], **settings), max(largest)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_one_process(layout):
    processes, family, settings = LAYOUTS[layout]
    same = {"model_kwargs": settings.get("model_kwargs", {"vocab_size": WORDS})}
    train_head = settings.get("train_head", False)
    losses, norms, grads = reference(family, ["all"], num_used=None, train_head=train_head, **same)
    results = pool(processes).run(run_watched, family, settings)
    for ours, ours_norms, ours_grads, _ in results:
        assert ours == pytest.approx(losses, rel=1e-6)
        assert ours_norms == pytest.approx(norms, rel=1e-5)
        assert ours_grads.keys() == grads.keys()
        for name, grad in grads.items():
            assert (ours_grads[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-9, name
    assert max(num_rows for *_, num_rows in results) == CHUNK_SIZE


def test_in_one_chunk_all_logits_would_be_seen():
    ((*_, num_rows),) = pool(1).run(run_watched, "mixtral", {}, 1000)
    assert num_rows > CHUNK_SIZE


def run_with_an_unknown_head():
    """A model that triples its logits without a setting that says so."""
    from transformers import MixtralForCausalLM

    forward = MixtralForCausalLM.forward

    def tripled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 3
        return output

    with patch.object(MixtralForCausalLM, "forward", tripled):
        return run_layout("mixtral", ["all"], 1, 2, pp=2), reference("mixtral", ["all"], num_used=None)


def test_a_head_that_does_more_than_is_known_gets_all_logits():
    for (ours, _, ours_grads), (losses, _, grads) in pool(2).run(run_with_an_unknown_head):
        assert ours == pytest.approx(losses, rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(ours_grads[name], grad, rtol=1e-4, atol=1e-6)
