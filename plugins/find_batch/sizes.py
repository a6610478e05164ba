"""Memory as a user writes it: `7.5GiB`, `8GB`, or a share of what the machine has, `80%`."""

from __future__ import annotations

import re

from plugins.errors import AccelError

UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
ALLOWED = "expected a size such as 7.5GiB or 8GB, or a share of the machine's memory such as 80%"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[a-z]+)", re.IGNORECASE)


def gib(text: str, total_gib: float) -> float:
    """The GiB that `text` means on a device that has `total_gib`.

    Args:
        text: a number and a unit: `B`, `KB` to `TB` (powers of 1000), `KiB` to `TiB` (of 1024), or `%`.
        total_gib: the device's whole memory.

    Raises:
        AccelError: no such size, none at all, or more than the device has.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = found[2].upper() if found else ""
    if found is None or (unit != "%" and unit not in UNITS):
        raise AccelError(f"--memory={text}: {ALLOWED}")
    number = float(found[1])
    value = number / 100 * total_gib if unit == "%" else number * UNITS[unit] / 2**30
    if value <= 0:
        raise AccelError(f"--memory={text}: no memory at all; {ALLOWED}")
    if value > total_gib:
        raise AccelError(
            f"--memory={text}: this machine has {shown(total_gib)}; give that or less, or a share such as 80%"
        )
    return value


def shown(value_gib: float | None) -> str:
    """`1.25 GiB`, `180 MiB`, or `-` where there is no figure."""
    if value_gib is None:
        return "-"
    return f"{value_gib:.2f} GiB" if value_gib >= 1 else f"{value_gib * 1024:.0f} MiB"
