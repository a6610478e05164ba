"""What grows with the job: data, distinct widths, parameters. And what a loop is given where nothing is measured."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import STEP_FIGURES, Contender, Figure, Figures, Job, Row, Section
from benchmarks.rows import loops, ocr, trainer

WINDOWS, ACCUMULATE = 150, 4  # of the core's own cost
CLIP, DECAY = 5.0, 0.999


# -- data and widths -------------------------------------------------------------------------------------------------


def widths(job: Job, count: int, padded: bool) -> Figures:
    """A convolution network compiled on batches of so many distinct widths; `padded`: in the plug's own buckets."""
    import random

    import torch
    from torch import nn

    from integrations.shared.bucketing import choose_edges
    from plugins.loop import Accelerated

    torch.manual_seed(0)
    seen = [32 + 8 * index for index in range(count)]
    edges = choose_edges(seen, 6, 8)
    if padded:
        seen = [min(edge for edge in edges if edge >= width) for width in seen]
    blocks = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )
    # `aot_eager`: the graphs are the same as inductor's, and take no minutes to build
    accel = Accelerated(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), compile="on", compile_backend="aot_eager", dims=(3,),
        memory_format="host", cache_dir=job.folder / "cache",
    )  # fmt: skip
    order = seen * job.sized(4, 1)
    random.Random(job.round).shuffle(order)
    began = time.process_time()
    for width in order:
        with accel.forward(torch.randn(4, 1, 32, width)) as x:
            loss = model(x).square().mean()
        accel.backward(loss, weight=4)
    seconds = time.process_time() - began
    accel.end(job.folder)
    facts = accel.session.report.compile
    return {
        "seconds": seconds / len(order), "graphs": facts.graphs, "recompiles": facts.recompiles,
        "distinct": len(set(seen)),
    }  # fmt: skip


# -- the core's own time ---------------------------------------------------------------------------------------------


def own_cost(job: Job, tensors: int, plug: bool, whole: bool) -> Figures:
    """Microseconds of a micro-batch and of an update, of a model that computes next to nothing.

    `whole`: with clipping and EMA, by torch's own functions in the plain loop.
    """
    import torch
    from torch import nn

    from plugins.loop import Accelerated

    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(tensors))

        def forward(self, x: Any) -> Any:
            return torch.cat(list(self.parts)).mul(x).mean()

    model, x = Model(), torch.randn(8 * tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    micro, closing = [], []
    if plug:
        more = {"clip_norm": CLIP, "ema": DECAY} if whole else {}
        accel = Accelerated(
            model, optimizer, accumulate=ACCUMULATE, compile="off", plan="off", memory_format="host", **more
        )
    elif whole:
        mean = loops.average(model)
    for _ in range(job.sized(WINDOWS, 5)):
        for index in range(ACCUMULATE):
            began = time.process_time()
            if plug:
                with accel.forward(x):
                    loss = model(x)
                accel.backward(loss, weight=1)
            else:
                (model(x) / ACCUMULATE).backward()
                if index == ACCUMULATE - 1:
                    if whole:
                        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
                    if whole:
                        mean.update_parameters(model)
            (closing if index == ACCUMULATE - 1 else micro).append(time.process_time() - began)
    kept = len(closing) // 10
    return {
        "micro": median(micro[kept:]) * 1e6, "update": (median(closing[kept:]) - median(micro[kept:])) * 1e6,
        "window": (median(closing[kept:]) + (ACCUMULATE - 1) * median(micro[kept:])) * 1e6,
    }  # fmt: skip


def cost_row(tensors: int, whole: bool) -> Row:
    more = ", clipping, EMA" if whole else ""
    return Row(
        f"core-{tensors}{'-whole' if whole else ''}",
        f"{tensors} parameters (tensors of 8), windows of {ACCUMULATE}{more}",
        tuple(
            Contender(name, partial(own_cost, tensors=tensors, plug=plug, whole=whole))
            for name, plug in (("plain loop", False), ("Accelerated", True))
        ),
    )


DATA_FIGURES = (
    Figure("seconds", "s a sample", ratio="ratio"),
    Figure("cpu_sample", "CPU s a sample", ratio="ratio of CPU time"),
    Figure("peak_gib", "peak GiB", "{:.2f}", ratio="ratio of memory"),
    Figure("graphs", "distinct shapes", "{:.0f}"),
)
SECTIONS = (
    Section(
        "growth",
        "Growth with the data",
        "One epoch over 1, 2 and 4 times the data, whole processes in turn: time a sample (of the training alone) and "
        "the process's peak memory should stay as they are.",
        DATA_FIGURES,
        (
            Row(
                "growth-trainer",
                "MiniLM (2 layers), docstrings up to 128 tokens, batch 16, plug at defaults, plan=off",
                tuple(Contender(f"{times}x", partial(trainer.epoch, times=times)) for times in (1, 2, 4)),
            ),
            Row(
                "growth-lines",
                "EasyOCR recognizer, lines of text, batch 32, plug fp32, plan=off",
                tuple(Contender(f"{times}x", partial(ocr.epoch, times=times)) for times in (1, 2, 4)),
                rounds=5,
            ),
        ),
    ),
    Section(
        "widths",
        "Growth with the number of distinct widths",
        "Four convolutions at `compile=on` (backend aot_eager, whose graphs are those of inductor), four batches of "
        "each width: graphs are bounded, whatever the number of widths.",
        (
            Figure("seconds", "CPU s a batch", ratio="ratio"),
            Figure("distinct", "widths met", "{:.0f}"),
            Figure("graphs", "graphs", "{:.0f}"),
            Figure("recompiles", "recompiles", "{:.0f}"),
        ),
        (
            Row(
                "widths",
                "widths from 32 px on, 8 px apart",
                (
                    *(Contender(f"{n} widths", partial(widths, count=n, padded=False)) for n in (4, 16, 64)),
                    *(Contender(f"{n} widths, in buckets", partial(widths, count=n, padded=True)) for n in (16, 64)),
                ),
            ),
        ),
    ),
    Section(
        "core",
        "The core's own time",
        "A model that computes next to nothing, so that what remains is the loop: microseconds of CPU time of a "
        "micro-batch, of what an update adds to its last micro-batch, and of a window of four; compile and plan off.",
        (
            Figure("micro", "µs a micro-batch", "{:.0f}", ratio="ratio"),
            Figure("update", "µs an update", "{:.0f}", ratio="ratio"),
            Figure("window", "µs a window", "{:.0f}", ratio="ratio"),
        ),
        tuple(cost_row(tensors, whole) for whole in (False, True) for tensors in (10, 300, 1000)),
    ),
    Section(
        "by-rule",
        "A loop where nothing is measured",
        "`Accelerated` with `forward` and `backward` goes by rule: `precision=host` takes the loop's own layout "
        "(`memory_format=host`), `precision=auto` bf16 and channels_last where the machine is fast in bf16. ResNet-18, "
        "64 px, batch 16, SGD, a step a batch; seconds an image. Steps in turn.",
        STEP_FIGURES,
        (
            Row("by-rule", "ResNet-18, 64 px, batch 16", loops.BY_RULE, steps=(4, 10)),
        ),
    ),
)  # fmt: skip
