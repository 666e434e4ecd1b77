import torch

from coati_ext.models.loss import GPTLMLoss, num_supervised_tokens


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 6, 11, generator=generator)
    labels = torch.randint(0, 11, (3, 6), generator=generator)
    labels[0, :4] = labels[1, 2] = -100
    labels[2] = -100
    return logits, labels


def test_one_denominator_makes_any_split_the_same_loss_and_gradient():
    logits, labels = batch()
    total = num_supervised_tokens(labels)
    whole = logits.clone().requires_grad_()
    GPTLMLoss()(whole, labels, total).backward()
    split = logits.clone().requires_grad_()
    parts = [GPTLMLoss()(split[i : i + 1], labels[i : i + 1], total) for i in range(3)]
    sum(parts).backward()
    mean = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(sum(parts), mean)
    torch.testing.assert_close(split.grad, whole.grad)


def test_a_batch_without_supervised_tokens_is_zero_and_stays_in_the_graph():
    logits, labels = batch()
    logits.requires_grad_()
    loss = GPTLMLoss()(logits[2:], labels[2:])
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


def test_the_first_label_is_not_counted():
    assert num_supervised_tokens(torch.tensor([[5, -100, 7], [5, 6, 7]])).item() == 3


def test_bf16_logits_are_summed_in_fp32():
    logits, labels = batch()
    loss = GPTLMLoss()(logits.bfloat16(), labels)
    assert loss.dtype == torch.float32


def test_shifted_labels_give_the_same_loss_and_count():
    logits = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, -100, 3, 4, 5, -100], [-100, -100, 2, -100, 0, 7]])
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert num_supervised_tokens(targets, shifted=True) == num_supervised_tokens(labels) == 6
    for count in (None, 4):
        torch.testing.assert_close(
            GPTLMLoss()(logits, targets, count, shifted=True), GPTLMLoss()(logits, labels, count), rtol=1e-6, atol=0
        )
