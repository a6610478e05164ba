"""`L.Trainer(callbacks=[AccelLightning()])`: the plug of Lightning's Trainer.

Composes the core's session with the adapter of the host; holds no host internals itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from integrations.lightning.adapter import KEY, Adapter
from integrations.lightning.trial import limit
from plugins.config import AccelConfig
from plugins.core import checkpoint as checkpoint_files
from plugins.errors import AccelError, refusals_as_errors
from plugins.host_tools import host_tools
from plugins.trial_run import request as trial
from plugins.trial_run.loop import loader as trial_loader

logger = logging.getLogger("plugins")


class AccelLightning(Callback):
    """Exact accumulation, EMA, compile in place and complete checkpoints for `Trainer.fit`.

    Args:
        config: a YAML file of settings, or None for `accel.yaml` where there is one.
        weight: of a batch, the targets that its loss is a mean over (tokens, pixels); None counts samples.
        options: fields of `AccelConfig`; they win over the file and the environment.

    Raises:
        AccelError: an unknown field or a bad value; in `fit`, what this host or this module cannot be served with.
    """

    def __init__(
        self,
        config: str | Path | None = None,
        *,
        weight: Callable[[Any], float | Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.config, self.weight = AccelConfig(config, **options), weight
        self._adapter: Adapter | None = None
        self._report: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None

    @property
    def report(self) -> dict[str, Any]:
        """The report of the fit at hand or of the last one, as in `accel_report.json`."""
        if self._adapter is not None:
            return self._adapter.session.report.data()
        if self._report is None:
            raise AccelError("report: there was no fit yet; call trainer.fit() first")
        return self._report

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle for another process, has the settings and no fit."""
        return {**vars(self), "_adapter": None, "_resumed": None}

    # -- events of the host ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Where this process is a trial of the fit: keep to its folder, and to its micro-batch."""
        if stage == "fit" and (asked := trial.current()) is not None:
            limit(trainer, asked.run_folder, trial_loader)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put back the random state of a run that is resumed."""
        if self._resumed is not None:  # now: the loader's iterator is made before `on_train_start`
            checkpoint_files.set_random_state(self._resumed["random"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the run, and put back the rest of what a resume needs."""
        tools = host_tools(self.config, "lightning", logger.warning, ("lightning",))
        with refusals_as_errors():
            self._adapter = Adapter(trainer, pl_module, tools, self.weight)
        state, self._resumed = self._resumed, None
        if state is not None:
            self._adapter.resume(state)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count and weigh the micro-batch; at a window's first, plans may be tried."""
        self._of_fit.batch_start(batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Multiply the loss's gradient by the micro-batch's weight, in place of the host's 1/K."""
        self._of_fit.before_backward(loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Make the gradients those of the big batch, before the host clips and steps."""
        with refusals_as_errors():
            self._of_fit.before_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Finish the update, if this micro-batch closed a window; then comes waiting for data."""
        self._of_fit.batch_end()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep validation apart from training, and show it the averaged weights where there are some."""
        if self._adapter is not None:
            self._adapter.validation_start()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Go back to training and its own weights."""
        if self._adapter is not None:
            self._adapter.validation_end()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add what a resume needs; averaged weights, where there are some, take the place of the model's."""
        if self._adapter is not None:
            self._adapter.save(checkpoint)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep our part of the checkpoint until the fit has started."""
        self._resumed = checkpoint.get(KEY)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run; the module keeps the averaged weights where there are some."""
        self._end(adopt=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run; the module keeps its own weights."""
        self._end(adopt=False)

    # -- parts -------------------------------------------------------------------------------------------------

    @property
    def _of_fit(self) -> Adapter:
        assert self._adapter is not None, "an event of a fit before on_train_start"
        return self._adapter

    def _end(self, adopt: bool) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.end(adopt)
            self._report = adapter.session.report.data()
