"""Fine-tune a text classifier: which package of the standard library does a docstring come from?

python examples/hf_text_accel.py [--model PATH] [--epochs 6] [--seed 0]
"""

from __future__ import annotations

import argparse
import time

import docstrings
from transformers import Trainer, TrainingArguments, set_seed

from plugins.hf import AccelCallback


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a pretrained encoder; default: a small one from a config")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=docstrings.MOST, help="samples a class")
    parser.add_argument("--output", default="demo/runs/hf_text")
    given = parser.parse_args()

    set_seed(given.seed)
    data = docstrings.load(given.most)
    tokenizer, model = docstrings.encoder(given.model, data["train"]["text"])
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=256), batched=True)

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=given.output,
            num_train_epochs=given.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=32,
            learning_rate=5e-5 if given.model else 1e-3,
            warmup_steps=0.1,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            logging_strategy="epoch",
            report_to=[],
            seed=given.seed,
        ),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[AccelCallback],
    )
    began = time.perf_counter()
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy {accuracy:.3f} after {time.perf_counter() - began:.0f} s")
    return accuracy


if __name__ == "__main__":
    main()
