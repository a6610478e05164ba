"""Samples of unequal length and the plainest collator that pads them, for the tests of buckets."""

from __future__ import annotations

from typing import Any

import torch


class TokenRows(torch.utils.data.Dataset[dict[str, Any]]):
    """A list of samples; `input_ids` are lists of unequal length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest sample: tokens and masks with 0, token labels with -100."""
    longest = max(len(f["input_ids"]) for f in features)

    def fill(values: Any, value: int) -> list[int]:
        return [*values, *[value] * (longest - len(values))]

    batch = {
        "input_ids": torch.tensor([fill(f["input_ids"], 0) for f in features]),
        "attention_mask": torch.tensor([fill([1] * len(f["input_ids"]), 0) for f in features]),
    }
    if "labels" in features[0]:
        tokens = isinstance(features[0]["labels"], list)
        batch["labels"] = torch.tensor([fill(f["labels"], -100) if tokens else f["labels"] for f in features])
    return batch


def unpadded(batch: dict[str, torch.Tensor]) -> list[dict[str, list[int]]]:
    """The samples of a padded batch, as `TokenRows` takes them: tokens and their labels, each [its length]."""
    columns = zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    return [
        {"input_ids": ids[: int(mask.sum())].tolist(), "labels": labels[: int(mask.sum())].tolist()}
        for ids, mask, labels in columns
    ]
