"""Starting points for a memory size, where nothing was measured yet: a forecast, and printed as one.

A model's figures are counted from the model itself by `benchmarks/presets.py`: its parameters, and the bytes that
autograd keeps of a sample. A training takes more than it keeps, and on a GPU a context beside it; the rest is a line.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from plugins.find_batch.forecast import Forecast

SIZES = (8, 12, 16, 24)  # GiB of memory
WANTED = 64  # samples an update, for the accumulation beside
CONTEXT = 0.8  # GiB: a process on a GPU
RESERVE = 0.9  # of the memory: the allocator's gaps, and what else the machine shows
STATE = 20  # bytes a parameter: weight, gradient, two moments, and a moving average
BESIDE = 1.25  # times what is kept: gradients of activations and workspaces, while backward goes through them
NOTE = (
    "Forecast, not measured: parameters x 20 bytes, activations counted from the models x 1.25, 0.8 GiB of context, "
    "within nine tenths of the memory. To measure your own: accel find-batch --memory SIZE -- COMMAND"
)


@dataclass(frozen=True)
class Start:
    """One kind of job.

    Attributes:
        kind: what it does.
        model: which model, at which size of input.
        parameters: how many.
        full_mib: what autograd keeps of a sample in fp32.
        half_mib: the same under bf16 autocast.
    """

    kind: str
    model: str
    parameters: int
    full_mib: float
    half_mib: float

    def forecast(self, half: bool) -> Forecast:
        """Of a training of this model."""
        mib = self.half_mib if half else self.full_mib
        return Forecast(CONTEXT + self.parameters * STATE / 2**30, mib * BESIDE / 1024)

    def micro_batch(self, memory_gib: float, half: bool) -> int:
        """The largest power of two up to `WANTED` that the forecast lets in; 0 where not one sample goes in."""
        largest = self.forecast(half).largest(memory_gib * RESERVE, WANTED)
        return 1 << (largest.bit_length() - 1) if largest else 0


STARTS = (
    Start("detection", "YOLOv8n, 640 px", 3_157_200, 183.5, 92.4),
    Start("detection", "YOLOv8s, 640 px", 11_166_560, 343.9, 173.1),
    Start("detection", "YOLOv8m, 640 px", 25_902_640, 617.4, 310.0),
    Start("recognition", "EasyOCR VGG-BiLSTM, 64 x 600 px", 3_781_345, 25.1, 17.3),
    Start("encoder", "MiniLM-L6, 256 tokens", 22_713_986, 95.7, 82.9),
    Start("encoder", "BERT-base, 256 tokens", 109_483_778, 272.3, 222.1),
    Start("encoder", "BERT-base, 512 tokens", 109_483_778, 760.6, 660.1),
)


def table() -> Table:
    """Micro-batch x accumulation for an update of `WANTED` samples, by memory; fp32 and bf16."""
    made = Table("for", "model", "precision", *(f"{size} GiB" for size in SIZES), title=f"forecast, {WANTED} an update")
    for start in STARTS:
        for half in (False, True):
            found = (start.micro_batch(size, half) for size in SIZES)
            cells = (f"{n} x {WANTED // n}" if n else "none" for n in found)
            made.add_row(start.kind, start.model, "bf16" if half else "fp32", *cells)
    return made
