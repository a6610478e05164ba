"""The machine's limit: the convolutions and linear layers of a training step alone, and the step's share of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import Contender, Figure, Figures, Job, Row, Section

Step = Callable[[], Any]


def detector(job: Job) -> tuple[Any, Callable[[Any], Any]]:
    """YOLOv8n, 160 px, batch 16, with its own loss."""
    import torch
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils import DEFAULT_CFG

    batch, size = job.sized((16, 160), (2, 64))
    model = DetectionModel("yolov8n.yaml", ch=3, nc=3, verbose=False)
    model.args = DEFAULT_CFG
    boxes = torch.rand(2 * batch, 4) * 0.5 + 0.25
    given = {
        "img": torch.rand(batch, 3, size, size), "cls": torch.zeros(2 * batch, 1), "bboxes": boxes,
        "batch_idx": torch.arange(2 * batch) // 2,
    }  # fmt: skip
    return model, lambda m: m(given)[0].sum()


def encoder(job: Job) -> tuple[Any, Callable[[Any], Any]]:
    """MiniLM's six layers, 128 tokens, batch 16."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    batch, length, layers = job.sized((16, 128, 6), (2, 16, 1))
    config = BertConfig(hidden_size=384, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=1536)
    words = torch.randint(1000, 30000, (batch, length))
    given = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.arange(batch) % 2}
    return BertForSequenceClassification(config), lambda m: m(**given).loss


MODELS = {"yolo": detector, "minilm": encoder}


def products(model: Any, loss: Callable[[Any], Any]) -> list[tuple[Any, Any, Any]]:
    """(layer, its input, the gradient of its output) of every convolution and linear layer of a step."""
    import torch
    from torch import nn

    found: list[tuple[Any, Any, Any]] = []

    def note(layer: Any, given: Any, out: Any) -> None:
        found.append((layer, given[0].detach().requires_grad_(given[0].requires_grad), torch.ones_like(out)))

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    loss(model)
    for hook in hooks:
        hook.remove()
    return found


def flops(step: Step) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def measure(job: Job, model: str, precision: str, layout: str) -> Figures:
    """TFLOP/s of a whole step and of its convolutions and linear layers alone, one step of each in turn."""
    import torch

    torch.manual_seed(0)
    made, loss = MODELS[model](job)
    if layout == "channels_last":
        made = made.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-4)
    inside = partial(torch.autocast, "cpu", torch.bfloat16) if precision == "bf16" else nullcontext

    def whole() -> None:
        with inside():
            value = loss(made)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    with inside():
        layers = products(made, loss)

    def alone() -> None:
        for layer, given, gradient in layers:
            with inside():
                out = layer(given)
            out.backward(gradient)
            given.grad = None
        optimizer.zero_grad()

    counts = {"whole": flops(whole), "alone": flops(alone)}
    taken: dict[str, list[float]] = {"whole": [], "alone": []}
    for index in range(job.sized(9, 2)):
        for name, step in (("whole", whole), ("alone", alone)):
            began = time.perf_counter()
            step()
            if index > job.sized(2, 0):
                taken[name].append(time.perf_counter() - began)
    step_s, alone_s = median(taken["whole"]), median(taken["alone"])
    return {
        "step_ms": step_s * 1e3, "alone_ms": alone_s * 1e3, "share": alone_s / step_s,
        "step_tflops": counts["whole"] / step_s / 1e12, "alone_tflops": counts["alone"] / alone_s / 1e12,
    }  # fmt: skip


def one_product(job: Job, kind: str, precision: str) -> Figures:
    """TFLOP/s of one large product or convolution: what the machine can do at best. The fastest of many."""
    import torch

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if kind == "product":
        n = job.sized(2048, 128)
        a, b, count = torch.randn(n, n, dtype=dtype), torch.randn(n, n, dtype=dtype), 2 * n**3
        step: Step = lambda: a @ b  # noqa: E731
    else:
        batch, width, size = job.sized((16, 128, 40), (1, 16, 8))
        layer = torch.nn.Conv2d(width, width, 3, padding=1, bias=False, dtype=dtype).to(
            memory_format=torch.channels_last
        )
        x = torch.randn(batch, width, size, size, dtype=dtype).to(memory_format=torch.channels_last)
        count, step = 2 * batch * width * width * 9 * size * size, lambda: layer(x)
    best = float("inf")
    with torch.no_grad():
        for _ in range(job.sized(20, 3)):
            began = time.perf_counter()
            step()
            best = min(best, time.perf_counter() - began)
    return {"alone_tflops": count / best / 1e12}


FORMS = (("fp32", "host"), ("fp32", "channels_last"), ("bf16", "host"), ("bf16", "channels_last"))


def in_forms(model: str, forms: tuple[tuple[str, str], ...]) -> tuple[Contender, ...]:
    return tuple(
        Contender(
            precision if layout == "host" else f"{precision}, {layout}",
            partial(measure, model=model, precision=precision, layout=layout),
        )
        for precision, layout in forms
    )


SECTION = Section(
    "limit",
    "The machine's limit",
    "A training step of fp32 or autocast to bf16, by hand, and its convolutions and linear layers alone, forward and "
    "backward, on the same tensors, step by step in turn. The share is time alone / time of the step: the rest is "
    "normalisation, activations, attention, loss and optimizer. One large product shows what the machine has at best.",
    (
        Figure("step_ms", "ms a step", ratio="ratio"),
        Figure("step_tflops", "TFLOP/s of the step", "{:.3f}"),
        Figure("alone_ms", "ms alone"),
        Figure("alone_tflops", "TFLOP/s alone", "{:.3f}", ratio="ratio"),
        Figure("share", "share", "{:.2f}"),
    ),
    (
        Row("limit-yolo", "YOLOv8n, 160 px, batch 16, SGD", in_forms("yolo", FORMS)),
        Row("limit-minilm", "MiniLM, 128 tokens, batch 16, SGD", in_forms("minilm", (FORMS[0], FORMS[2]))),
        Row(
            "limit-one", "one product [2048, 2048]; one 3x3 convolution, 128 channels, 16 x 40 x 40 px, channels_last",
            tuple(
                Contender(f"{kind}, {precision}", partial(one_product, kind=kind, precision=precision))
                for kind in ("product", "convolution") for precision in ("fp32", "bf16")
            ),
        ),
    ),
)  # fmt: skip
