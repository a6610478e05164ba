"""A small YAML file of settings, read within bounds: what a stranger wrote in it takes no more memory than its length.

A few lines of anchors and merges can stand for more values than any memory holds, so what the text expands to is
counted before it is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

LARGEST = 2**22  # bytes of the file, and characters of all that its aliases stand for


class UnreadableYaml(ValueError):
    """What is wrong with the file, in one line that does not name it."""


def read_yaml(path: Path) -> tuple[Any, Any]:
    """The values of a file, and the same with every scalar as the text that was written.

    Args:
        path: UTF-8, with or without BOM.

    Raises:
        UnreadableYaml: it is no YAML, is too large, or its aliases stand for too much.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UnreadableYaml(f"over {LARGEST >> 20} MiB, which no settings take")
    try:
        text = data.decode("utf-8-sig")
        return _built(yaml.SafeLoader(text)), _built(yaml.BaseLoader(text))
    except UnreadableYaml:
        raise
    except Exception as error:  # also a date that is none, an endless number, lists in thousands of lists
        raise UnreadableYaml(" ".join(str(error).split())[:300] or type(error).__name__) from None


def _built(loader: Any) -> Any:
    """The loader's one document."""
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _characters(node, {}, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _characters(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """Characters of all that a node stands for, its aliases written out.

    Args:
        node: of the document.
        known: the same of nodes that were met before.
        above: the nodes that this one lies in.
    """
    if id(node) in above:
        raise UnreadableYaml("a list or mapping that holds itself")
    if id(node) not in known:
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        own = 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        known[id(node)] = own + sum(_characters(part, known, above | {id(node)}) for part in parts)
    if known[id(node)] > LARGEST:
        raise UnreadableYaml(f"its aliases stand for over {LARGEST >> 20} MiB of text")
    return known[id(node)]
