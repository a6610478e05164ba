from __future__ import annotations

import torch

from integrations.easyocr.labels import converter, ctc_loss, encode, frames_needed, infeasible


def by_hand(logits, labels, codec):
    """The mean over samples of loss / length, one sample at a time in fp64; infeasible samples give zero."""
    total = logits.new_zeros((), dtype=torch.float64)
    for row, label in zip(logits, labels, strict=True):
        if frames_needed(label) > len(row):
            continue
        classes, _ = encode([label], codec)
        log_p = row.double().log_softmax(1)[:, None]
        loss = torch.nn.functional.ctc_loss(log_p, classes[None], [len(row)], [len(label)], reduction="sum")
        total = total + loss / len(label)
    return total / len(labels)


def test_the_loss_is_the_mean_over_samples_of_loss_by_length():
    torch.manual_seed(0)
    codec, labels = converter("abc"), ["a", "abca", "ccc"]
    logits = torch.randn(3, 7, 4, requires_grad=True)
    loss = ctc_loss(logits, *encode(labels, codec))
    right = by_hand(logits, labels, codec)
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=0)
    (ours,) = torch.autograd.grad(loss, logits)
    (theirs,) = torch.autograd.grad(right, logits)
    assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_a_label_that_needs_too_many_frames_gives_no_gradient_and_is_counted():
    codec, labels = converter("abc"), ["aab", "ab"]
    assert [frames_needed(label) for label in labels] == [4, 2]
    assert infeasible(labels, 3) == 1
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = ctc_loss(logits, *encode(labels, codec))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad[0].abs().sum() == 0
    assert logits.grad[1].abs().sum() > 0


def test_half_precision_logits_are_scored_in_fp32_even_inside_autocast():
    codec = converter("abc")
    logits = torch.randn(2, 6, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ctc_loss(logits, *encode(["ab", "c"], codec))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, ctc_loss(logits.float(), *encode(["ab", "c"], codec)))
