"""Words of many allocators that say the same."""

from __future__ import annotations

import pytest

from plugins.core.system.shortage import says_short


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", True),
        ("OSError: [Errno 12] Cannot allocate memory", True),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("  File 'train.py', line 3\nMemoryError", True),
        ("ValueError: no memory module of that name", False),
        ("", False),
    ],
)
def test_what_says_that_memory_did_not_suffice(text: str, short: bool) -> None:
    assert says_short(text) is short
