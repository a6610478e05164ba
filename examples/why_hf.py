"""Why rows of the Hugging Face plug: the Trainer alone against the Trainer with the plug, on tiny data.

    python examples/why_hf.py          # about two minutes on 2 CPU cores

`rows()` gives (case, host alone, with the plug). Every row runs the real Trainer twice; nothing is a stand-in but
the faults themselves (a NaN, a full memory, a kill).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout that is not installed works too
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from plugins.hf import AccelCallback  # noqa: E402

Row = tuple[str, str, str]
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of one batch."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class Gradients(TrainerCallback):
    """The gradient of every update, flat."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.found.append(flat(model, lambda p: p.grad))


def flat(model: Any, part: Callable[[Any], Any] = lambda p: p.detach()) -> torch.Tensor:
    return torch.cat([part(p).flatten().clone() for p in model.parameters() if part(p) is not None])


def classifier(kind: Any = BertForSequenceClassification) -> Any:
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES))


def sequences(number: int) -> Rows:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (number, 16), generator=generator)
    return Rows(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids[:, 0] % 3)


def train(
    folder: Path, plugged: bool, data: Rows, model: Any, *callbacks: Any, options: Any = None, **more: Any
) -> Trainer:
    """A trainer that has trained."""
    trainer = build(folder, plugged, data, model, *callbacks, options=options, **more)
    trainer.train()
    return trainer


def build(
    folder: Path, plugged: bool, data: Rows, model: Any, *callbacks: Any, options: Any = None, **more: Any
) -> Trainer:
    arguments = {
        "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
        "learning_rate": 1e-3, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0, **more,
    }  # fmt: skip
    plug = [AccelCallback(**(options or {}))] if plugged else []
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[*plug, *callbacks],
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def times_k(folder: Path) -> Row:
    """transformers#47688: a head that ignores the count gives a loss and a gradient times K."""
    data = sequences(16)

    def shown(plugged: bool) -> str:
        split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "learning_rate": 3e-2}
        return ", ".join(
            f"{loss:.2f}" for loss in losses(train(folder, plugged, data, classifier(), max_steps=4, **split))
        )

    whole = train(
        folder, False, data, classifier(), max_steps=4, per_device_train_batch_size=4, learning_rate=3e-2
    )  # fmt: skip
    right = ", ".join(f"{loss:.2f}" for loss in losses(whole))
    return f"BERT, four updates of 1 x 4; as 4 x 1 the losses are {right}", shown(False), shown(True)


def token_counts(folder: Path) -> Row:
    """Two micro-batches of 1 and 39 labels: how far the gradient is from that of one batch."""
    ids = torch.randint(3, 60, (2, 39), generator=torch.Generator().manual_seed(2))
    labels = ids % 3
    labels[0, 1:] = -100
    data = Rows(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)

    def gradient(plugged: bool, size: int) -> torch.Tensor:
        spy = Gradients()
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2 // size}
        train(folder, plugged, data, classifier(BertForTokenClassification), spy, max_steps=1, **split)
        return spy.found[0]

    right = gradient(False, 2)
    off = [float((gradient(plugged, 1) - right).norm() / right.norm()) for plugged in (False, True)]
    return "micro-batches of 1 and 39 labels: gradient off by", f"{off[0]:.2g}", f"{off[1]:.0e}"


def not_a_number(folder: Path) -> Row:
    """One NaN micro-batch of three."""

    def lost(plugged: bool) -> str:
        vectors = torch.randn(6, 8, 32, generator=torch.Generator().manual_seed(3))
        vectors[2] = float("nan")
        data = Rows(inputs_embeds=vectors, labels=torch.tensor([0, 1, 2, 0, 1, 2]))
        model = train(folder, plugged, data, classifier(), max_steps=3, per_device_train_batch_size=2).model
        parts = list(model.parameters())
        return f"{sum(not bool(p.isfinite().all()) for p in parts)} of {len(parts)} parameters lost"

    return "one NaN micro-batch", lost(False), lost(True)


def out_of_memory(folder: Path) -> Row:
    """Memory that holds 4 samples, asked for 8 x 2."""

    def becomes(plugged: bool) -> str:
        seen: list[int] = []
        trainer = build(
            folder, plugged, sequences(32), classifier(), max_steps=1, per_device_train_batch_size=8,
            gradient_accumulation_steps=2, auto_find_batch_size=True,
        )  # fmt: skip
        step = trainer.training_step

        def tight(model: Any, inputs: Any, *args: Any) -> Any:
            seen.append(len(inputs["input_ids"]))
            if seen.count(8) == 1 and seen[-1] == 8:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
            return step(model, inputs, *args)

        trainer.training_step = tight
        trainer.train()
        used = seen[seen.index(8) + 1 :]
        return f"{used[0]} x {len(used)}: an update of {sum(used)} samples"

    return "one out-of-memory at 8 x 2", becomes(False), becomes(True)


def killed_while_saving(folder: Path) -> Row:
    """transformers#35525: the process dies in the middle of a save; what auto-resume then does."""

    def resumed(plugged: bool) -> str:
        run = folder / f"killed-{plugged}"
        me = [sys.executable, str(Path(__file__).resolve()), "--save", str(run), str(int(plugged))]
        assert subprocess.run([*me, "kill"], capture_output=True).returncode == -signal.SIGKILL
        done = subprocess.run([*me, "resume"], capture_output=True, text=True)
        if done.returncode == 0:
            return f"resumes from {done.stdout.split()[-1]}"
        return f"dies: {done.stderr.strip().splitlines()[-1][:70]}"

    return "killed while checkpoint-4 was saved, then resumed", resumed(False), resumed(True)


def _saving(run: Path, plugged: bool, resume: bool) -> None:
    trainer = build(
        run, plugged, sequences(16), classifier(), max_steps=6, per_device_train_batch_size=2, save_strategy="steps",
        save_steps=2, optim="adamw_torch",
    )  # fmt: skip
    if not resume:
        write, seen = torch.save, [0]

        def killed(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            seen[0] += str(path).endswith("optimizer.pt")
            if seen[0] == 2:
                Path(path).write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            write(what, path, *args, **kwargs)

        torch.save = killed
    logging.disable()
    taken: list[str] = []
    load = trainer._load_from_checkpoint
    trainer._load_from_checkpoint = lambda path, *args: (taken.append(Path(path).name), load(path, *args))[1]
    trainer.train(resume_from_checkpoint=resume)
    print(*taken)


def ranks_apart(folder: Path) -> Row:
    """Two ranks that evaluate before they train: how far their weights are from each other afterwards."""

    def apart(plugged: bool) -> str:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0", str(Path(__file__).resolve()), "--ranks", str(folder), str(int(plugged)),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("apart ")]
        return found[0] if found else f"dies: {done.stderr.strip().splitlines()[-1][:70]}"

    return "two ranks, evaluate() before train(): weights apart by", apart(False), apart(True)


def _ranks(folder: Path, plugged: bool) -> None:
    trainer = build(
        folder, plugged, sequences(32), classifier(), max_steps=8, per_device_train_batch_size=2, learning_rate=1e-2
    )
    trainer.evaluate()
    trainer.train()
    mine = flat(trainer.model)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    if dist.get_rank() == 0:
        print(f"apart {float((both[0] - both[1]).abs().max()):.2g}", flush=True)
    dist.barrier()  # a rank that ends first would end the other before it prints
    dist.destroy_process_group()


CASES = (times_k, token_counts, ranks_apart, not_a_number, out_of_memory, killed_while_saving)


def rows() -> Iterator[Row]:
    """(case, host alone, with the plug), measured as they are asked for."""
    logging.getLogger("plugins").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            yield case(Path(folder))


def main() -> None:
    table = Table("Hugging Face Trainer", "alone", "with AccelCallback")
    for row in rows():
        table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        _saving(Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4] == "resume")
    elif sys.argv[1:2] == ["--ranks"]:
        _ranks(Path(sys.argv[2]), sys.argv[3] == "1")
    else:
        main()
