"""`Trainer(callbacks=[AccelCallback])`: the Hugging Face plug.

Composes the core's session with the adapter of the host; holds no host internals itself.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback

from integrations.contract import NewSession, Session
from integrations.huggingface.adapter import Adapter
from integrations.huggingface.frames import adding_trainer, find_trainer
from integrations.huggingface.trial import facts, limit
from plugins.config import AccelConfig
from plugins.core.autotune.plan_file import check_plan_file
from plugins.errors import AccelError, refusals_as_errors
from plugins.host_tools import host_tools
from plugins.trial_run import request as trial

logger = logging.getLogger("plugins")


class AccelCallback(TrainerCallback):
    """Exact accumulation, buckets, compile in place, EMA and atomic checkpoints for a Trainer.

    Args:
        config: a YAML file of settings, or None for `accel.yaml` where there is one.
        **options: fields of `AccelConfig`; they win over the file and the environment.

    Raises:
        AccelError: an unknown field, a bad value, or a contradiction with TrainingArguments; one line.
    """

    def __init__(self, config: str | None = None, **options: Any) -> None:
        self.config = AccelConfig(config, **options)
        self.adapter: Adapter | None = None
        self.session: Session | None = None
        # `trainer.add_callback(AccelCallback)` builds the callback below the trainer's own frame
        trainer = adding_trainer()
        if trainer is not None:
            self.attach(trainer)

    @property
    def report(self) -> dict[str, Any]:
        """The report of the run at hand or of the last one, as in `accel_report.json`."""
        if self.session is None:
            raise AccelError("report: there was no run yet; call trainer.train() first")
        return self.session.report.data()

    def detach(self) -> None:
        """Take everything off the trainer; it is the host's own again."""
        if self.adapter is not None:
            self.adapter.detach()
            self.adapter = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, has the settings and no trainer yet."""
        return {**vars(self), "adapter": None, "session": None}

    # -- events of the host ------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take hold of the trainer that has just been built."""
        self.attach(find_trainer())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take hold of the trainer, if it is not held yet, and begin the run."""
        # added as an instance after the trainer was built: no event came before this one
        self.attach(find_trainer())
        assert self.adapter is not None
        with refusals_as_errors():
            self.adapter.begin()
        trial.note(**(facts(self.adapter.trainer) if trial.current() is not None else {}))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the loaders which epoch begins, where the host's loop has no method an epoch."""
        if self.adapter is not None:
            self.adapter.epoch_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the update, where asking for the norm has not, and keep the host from stepping a skipped one."""
        if self.adapter is not None:
            self.adapter.windows.before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the update: the average moves, and the window is closed."""
        if self.adapter is not None:
            self.adapter.windows.after_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the update, and take off the mark that kept the host's schedule still."""
        if self.adapter is not None:
            self.adapter.windows.step_ended()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run; averaged weights become the model's, unless the host loads its best checkpoint."""
        if self.adapter is not None:
            self.adapter.finish()

    # -- parts -------------------------------------------------------------------------------------------------

    def attach(self, trainer: Any) -> None:
        """Take hold of a trainer, and let go of an earlier one.

        Raises:
            AccelError: its arguments contradict the settings, or `trainer` is None.
        """
        if trainer is None:
            raise AccelError("AccelCallback: no Trainer found; pass it in Trainer(callbacks=[AccelCallback])")
        if self.adapter is not None and self.adapter.trainer is trainer:
            return
        self.detach()
        check_plan_file(self.config)
        if (asked := trial.current()) is not None:
            limit(trainer, asked.run_folder, asked.micro_batch, bool(set(trial.CONTRADICTING) & asked.settings.keys()))
        tools = host_tools(
            self.config, "huggingface", logger.warning, ("transformers", "accelerate", "datasets", "peft")
        )
        with refusals_as_errors():
            self.adapter = Adapter(trainer, self, replace(tools, new_session=self._keeping(tools.new_session)))

    def _keeping(self, new_session: NewSession) -> NewSession:
        """The run's session stays here when the run is over: for its report."""

        def build(model: Any, optimizer: Any, **built: Any) -> Session:
            self.session = new_session(model, optimizer, **built)
            return self.session

        return build
