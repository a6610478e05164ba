"""examples/docstrings.py: the texts' vocabulary."""

from __future__ import annotations

from examples import docstrings


def test_the_vocabulary_is_of_the_texts_alone_so_that_every_process_learns_the_same() -> None:
    tokenizer = docstrings.small_tokenizer(["dog Cat cat", "an owl, an owl; a dog", "cat"])
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    letters = sorted(set("dogcatanowl,;"))
    ties = ["an", "dog", "owl"]  # two of each
    assert words == [*docstrings.SPECIAL, *letters, *(f"##{letter}" for letter in letters), "cat", *ties]
    assert tokenizer.tokenize("a CAT and an owla zebra") == ["a", "cat", "an", "##d", "an", "owl", "##a", "[UNK]"]
