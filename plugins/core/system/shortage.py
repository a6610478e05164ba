"""How it is said that memory did not suffice, and what memory is counted in. Imports nothing heavy."""

from __future__ import annotations

GIB = 1024**3
# Of errors that are no `torch.OutOfMemoryError`: the CPU's allocator, cuBLAS, MPS, older releases and other devices.
SHORT = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "status_alloc_failed",
    "devmem allocation failed",
)


def says_short(text: str) -> bool:
    """Whether an error's words, or the last lines of a process, say that memory did not suffice."""
    told = text.lower()
    return any(words in told for words in (*SHORT, "memoryerror"))
