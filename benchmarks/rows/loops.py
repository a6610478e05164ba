"""Hand-written loops and what people put around them: ResNet-18 on drawn stripes, by hand, Accelerate, Lightning, ours.

All have the same update: two micro-batches, mean of both, L2 norm clipped to 5, SGD with momentum, EMA 0.999 of the
weights; all on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

from benchmarks.harness import Contender, Figures, Job, since_start

BATCH, SIZE = 16, 64  # pictures of a micro-batch; px
ACCUMULATE, CLIP, DECAY = 2, 5.0, 0.999


def parts(job: Job, count: int = 8) -> tuple[Any, Any, list[Any]]:
    """Model, optimizer and micro-batches."""
    import torch
    from gratings import CLASSES, gratings
    from torchvision.models import resnet18

    torch.manual_seed(0)
    batch, size = job.sized(BATCH, 2), job.sized(SIZE, 32)
    images, labels = gratings(batch * count, seed=1, size=size)
    model = resnet18(num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, list(zip(images.split(batch), labels.split(batch), strict=True))


def average(model: Any) -> Any:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def plain(job: Job, precision: str = "fp32", layout: str = "host", whole_update: bool = False) -> None:
    """By hand. `whole_update`: accumulation, clipping and EMA; else a step after every batch."""
    import torch
    from torch.nn.functional import cross_entropy

    model, optimizer, batches = parts(job)
    moved = {"memory_format": torch.channels_last} if layout == "channels_last" else {}
    model = model.to(**moved)
    mean = average(model) if whole_update else None
    inside = partial(torch.autocast, "cpu", torch.bfloat16) if precision == "bf16" else nullcontext
    micro = ACCUMULATE if whole_update else 1
    for index, (images, labels) in enumerate(chain.from_iterable(repeat(batches))):
        with inside():
            loss = cross_entropy(model(images.to(**moved)), labels)
        (loss / micro).backward()
        if (index + 1) % micro == 0:
            if mean is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if mean is not None:
                mean.update_parameters(model)
            job.step(micro * len(images))


def by_rule(job: Job, **options: Any) -> None:
    """`Accelerated` with `forward` and `backward`, where nothing is measured."""
    from torch.nn.functional import cross_entropy

    from plugins.loop import Accelerated

    model, optimizer, batches = parts(job)
    accel = Accelerated(model, optimizer, micro_batch=BATCH, cache_dir=job.folder / "cache", **options)
    for images, labels in chain.from_iterable(repeat(batches)):
        with accel.forward(images, labels) as (images, labels):
            loss = cross_entropy(model(images), labels)
        accel.backward(loss, weight=len(images))
        job.step(len(images))


class Endless:
    """A loader of `count` micro-batches, which begins anew: a run of which some are measured."""

    def __init__(self, batches: list[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return islice(chain.from_iterable(repeat(self.batches)), self.count)


def measured(job: Job, **options: Any) -> None:
    """`Accelerated` with `batches` and `training_step`: what is auto is measured in the first updates."""
    from torch.nn.functional import cross_entropy

    from plugins.loop import Accelerated

    model, optimizer, batches = parts(job)
    accel = Accelerated(
        model, optimizer, accumulate=ACCUMULATE, clip_norm=CLIP, ema=DECAY, cache_dir=job.folder / "cache", **options
    )
    for index, batch in enumerate(accel.batches(Endless(batches, job.sized(4000, 20)))):
        accel.training_step(lambda batch: cross_entropy(model(batch[0]), batch[1]), batch)
        if (index + 1) % ACCUMULATE == 0:
            job.step(ACCUMULATE * len(batch[0]))


def first_update(job: Job, plug: dict[str, Any] | None = None) -> Figures:
    """Seconds of the process up to its first update, of a run of 4,000."""
    found: Figures = {}

    class First:
        """Takes the place of the turns of a row of steps."""

        def done(self, units: float) -> None:
            found["first"] = since_start()
            raise StopIteration

    job.turns = First()  # type: ignore[assignment]
    with suppress(StopIteration):
        plain(job, whole_update=True) if plug is None else measured(job, **plug)
    return found


def accelerate(job: Job, precision: str = "no") -> None:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator
    from torch.nn.functional import cross_entropy

    model, optimizer, batches = parts(job)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, mixed_precision=precision, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    mean = average(accelerator.unwrap_model(model))
    for images, labels in chain.from_iterable(repeat(batches)):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                mean.update_parameters(accelerator.unwrap_model(model))
                job.step(ACCUMULATE * len(images))


def lightning(job: Job, plug: dict[str, Any] | None = None, precision: str = "32-true") -> None:
    """Lightning's Trainer with its own accumulation, clipping and EMA callback; or with `AccelLightning`."""
    import lightning as L
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from torch.nn.functional import cross_entropy

    model, optimizer, batches = parts(job)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen % ACCUMULATE == 0:
                job.step(ACCUMULATE * len(batches[0][0]))

    if plug is None:
        averages: Any = EMAWeightAveraging(decay=DECAY)
    else:
        from plugins.lightning import AccelLightning

        averages = AccelLightning(ema=DECAY, cache_dir=job.folder / "cache", **plug)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=job.sized(4000, 20), accumulate_grad_batches=ACCUMULATE, gradient_clip_val=CLIP,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[averages], precision=precision, default_root_dir=job.folder,
    )  # fmt: skip
    trainer.fit(Module(), train_dataloaders=Endless(batches, 2 * trainer.max_steps))


def contenders(made: dict[str, Callable[[Job], None]]) -> tuple[Contender, ...]:
    return tuple(Contender(name, function) for name, function in made.items())


AGAINST = contenders(
    {
        "by hand": partial(plain, whole_update=True),
        "by hand, bf16": partial(plain, whole_update=True, precision="bf16"),
        "Accelerate": accelerate,
        "Accelerate, mixed_precision=bf16": partial(accelerate, precision="bf16"),
        "Lightning": lightning,
        "Lightning, bf16-mixed": partial(lightning, precision="bf16-mixed"),
        "Accelerated, plan=off compile=off memory_format=host": partial(
            measured, plan="off", compile="off", memory_format="host"
        ),
        "Accelerated": measured,
        "Accelerated, precision=auto": partial(measured, precision="auto"),
        "AccelLightning": partial(lightning, plug={}),
        "AccelLightning, precision=auto": partial(lightning, plug={"precision": "auto"}),
    }
)
BY_RULE = contenders(
    {
        "plain loop": plain,
        "plain, channels_last": partial(plain, layout="channels_last"),
        "plain, bf16": partial(plain, precision="bf16"),
        "plain, bf16, channels_last": partial(plain, precision="bf16", layout="channels_last"),
        "Accelerated, memory_format=host": partial(by_rule, memory_format="host"),
        "Accelerated, memory_format=channels_last": partial(by_rule, memory_format="channels_last"),
        "Accelerated, precision=auto": partial(by_rule, precision="auto"),
    }
)
