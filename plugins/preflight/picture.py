"""The losses of a learning rate scan, drawn."""

from __future__ import annotations

from pathlib import Path

from plugins.errors import AccelError
from plugins.preflight.learning import losses
from plugins.preflight.trials import Trials


def draw(trials: Trials, file: Path) -> None:
    """One line a rate: the loss over updates.

    Args:
        trials: with a scan.
        file: a picture in a format that matplotlib knows by its suffix.

    Raises:
        AccelError: no matplotlib, or a file that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise AccelError("lr-scan: a picture needs matplotlib; pip install matplotlib") from None
    base = max((max(u["rates"]) for u in trials.first.updates), default=0.0)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for factor, result in sorted(trials.scanned.items()):
        axes.plot(losses(result.updates), label=f"{base * factor:.3g} (x{factor:g})")
    axes.set(xlabel="update", ylabel="loss", title="Loss at each learning rate", yscale="symlog")
    axes.legend(title="highest rate", frameon=False)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise AccelError(f"picture={file}: {error}") from None
