"""Train a small ResNet to name drawn shapes, with a batch that is accumulated.

python examples/hf_image_plain.py [--epochs 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import numpy as np
import shapes
import torch
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments, set_seed

SIZE = 48  # px


def drawn(number: int, seed: int) -> list[dict[str, Any]]:
    """`number` samples: pixel_values [3, 48, 48] in -1 to 1, and the class of the one shape on it."""
    generator, samples = random.Random(seed), []
    for _ in range(number):
        image, objects = shapes.draw(generator, SIZE, most=1)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        samples.append({"pixel_values": pixels, "labels": objects[0][0]})
    return samples


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=600, help="training images")
    parser.add_argument("--output", default="demo/runs/hf_image")
    given = parser.parse_args()

    set_seed(given.seed)
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=[1, 1, 1],
        layer_type="basic",
        num_labels=len(shapes.CLASSES),
    )
    trainer = Trainer(
        model=ResNetForImageClassification(config),
        args=TrainingArguments(
            output_dir=given.output,
            num_train_epochs=given.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=50,
            learning_rate=3e-3,
            warmup_steps=0.1,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            logging_strategy="epoch",
            report_to=[],
            seed=given.seed,
        ),
        train_dataset=drawn(given.most, 1),
        eval_dataset=drawn(200, 2),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    began = time.perf_counter()
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy {accuracy:.3f} after {time.perf_counter() - began:.0f} s")
    return accuracy


if __name__ == "__main__":
    main()
