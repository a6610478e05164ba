"""Word accuracy and normalised edit distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein


@dataclass(frozen=True)
class Score:
    """accuracy: share of lines read without a mistake, 0..1. similarity: mean of 1 - edits / longer length, 0..1."""

    accuracy: float
    similarity: float
    lines: int

    def better_than(self, other: Score | None) -> bool:
        """By word accuracy, then by similarity; anything is better than None."""
        return other is None or (self.accuracy, self.similarity) > (other.accuracy, other.similarity)


def score(read: Sequence[str], labels: Sequence[str]) -> Score:
    """Compares what was read with what is written; both have one text a line."""
    if not labels:
        return Score(0.0, 0.0, 0)
    right = sum(a == b for a, b in zip(read, labels, strict=True))
    similar = sum(Levenshtein.normalized_similarity(a, b) for a, b in zip(read, labels, strict=True))
    return Score(right / len(labels), similar / len(labels), len(labels))
