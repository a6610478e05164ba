"""Real text without a download: docstrings of Python's standard library, labelled with the package they come from.

python examples/docstrings.py        # shows the classes and a few samples
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
MOST = 180  # samples a class, so that none rules
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def docstrings(package: str, least: int = 4) -> list[str]:
    """Docstrings of at least `least` words in one package or module of the standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((root / package).rglob("*.py")) or [root / f"{package}.py"]
    found: dict[str, None] = {}
    for path in files:
        if {"test", "tests"} & set(path.parts) or not path.is_file():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if len(text.split()) >= least:
                    found[text] = None
    return list(found)


def load(most: int = MOST, seed: int = 0) -> DatasetDict:
    """`text` and `labels`, split into train and test (a quarter)."""
    rows: list[dict[str, Any]] = []
    for label, package in enumerate(PACKAGES):
        texts = docstrings(package)
        random.Random(seed).shuffle(texts)
        rows += [{"text": text, "labels": label} for text in texts[:most]]
    return Dataset.from_list(rows).train_test_split(test_size=0.25, seed=seed)


def small_tokenizer(texts: list[str], words: int = 4000) -> PreTrainedTokenizerFast:
    """A WordPiece vocabulary of these texts: every character, and the words that they use most.

    The library's own trainer breaks ties in the order of a hash, so that no two processes learn the same one.
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    parts = [word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))]
    letters = sorted({letter for word in parts for letter in word})
    counts = Counter(parts)
    most = sorted(counts, key=lambda word: (-counts[word], word))
    kept = list(dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *most]))[:words]
    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(kept)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=256, **names)


def encoder(path: str | None, texts: list[str]) -> tuple[Any, Any]:
    """(tokenizer, model with a classification head): a small one from a config, or a real one from `path`."""
    if path:
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(PACKAGES))
        return AutoTokenizer.from_pretrained(path), model
    tokenizer = small_tokenizer(texts)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=256, num_labels=len(PACKAGES),
    )  # fmt: skip
    return tokenizer, BertForSequenceClassification(config)


if __name__ == "__main__":
    data = load()
    print(data)
    for row in data["train"].select(range(3)):
        print(f"{PACKAGES[row['labels']]}: {row['text'].splitlines()[0]}")
