"""fit: fine-tunes an EasyOCR recognizer from the official yaml, and leaves files that `easyocr.Reader` loads.

    from plugins.easyocr import fit
    result = fit("config.yaml", accumulate=2)
    result.reader().readtext("page.png")

In the experiment folder: `last.pt` (everything a resume needs), `best_accuracy.pth`, `best_norm_ED.pth`, the Reader's
three files (`model/NAME.pth`, `user_network/NAME.yaml`, `user_network/NAME.py`), `log.csv`, `curves.png`,
`mistakes.png`, `tensorboard/` and `accel_report.*`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from integrations.easyocr.checkpointing import Result, earlier_run, in_the_way
from integrations.easyocr.prepare import prepare
from integrations.easyocr.settings import read_settings
from plugins.config import AccelConfig
from plugins.core.autotune.plan_file import check_plan_file
from plugins.core.checkpoint.rng_state import seed_everything
from plugins.core.checkpoint.run_lock import FolderInUse, run_lock
from plugins.core.system.distributed import joined
from plugins.easyocr import training
from plugins.errors import AccelError, refusals_as_errors
from plugins.trial_run import request as trial

__all__ = ["Result", "fit"]

FOLDERS = ("model", "user_network")  # of the Reader's files, in the experiment's


def fit(
    config: str | Path | dict[str, Any],
    *,
    train: Any = None,
    valid: Any = None,
    resume: bool | str | Path = False,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Result:
    """Fine-tune a recognizer, until `num_iter` updates, an early stop, or Ctrl-C.

    Ctrl-C finishes the update and saves everything. A run of which 100 updates in a row were skipped, for a gradient
    that is not finite, ends as well.

    Args:
        config: the official yaml, or its keys as a mapping; `accel:` in it holds AccelConfig's fields.
        train: a folder or a Hugging Face data set, instead of the yaml's train_data.
        valid: the same, instead of its valid_data.
        resume: True goes on from the experiment's own last.pt, a path from that file.
        say: shows a line to the user.
        **options: keys of the yaml and fields of AccelConfig, laid over both.

    Returns:
        What the run came to: its folder, the Reader's files, scores, and why it stopped.

    Raises:
        AccelError: one line that names the file or key, the value and what is allowed; nothing is written then.
    """
    options |= _of_trial()
    fields = {f.alias or name for name, f in AccelConfig.model_fields.items()}
    with refusals_as_errors():
        settings, accel = read_settings(config, fields, **{k: v for k, v in options.items() if k not in fields})
        chosen = _config({**accel, **{k: v for k, v in options.items() if k in fields}})
        seed_everything(settings.manualSeed if chosen.seed == "host" else int(chosen.seed))
        check_plan_file(chosen)
        prepared = prepare(settings, train, valid)
    last = prepared.folder / "last.pt"
    start = last if resume is True else Path(resume) if resume else None
    if start is not None and not start.is_file():
        raise AccelError(f"{start}: no such file; expected the last.pt of a run")
    own = start is not None and start.resolve() == last.resolve()
    if not own and (found := earlier_run(prepared)):
        on = "resume=True (--resume) goes on from it, " if found == last else ""
        raise AccelError(
            f"experiment_name={settings.experiment_name}: {found} is there already; {on}"
            "another experiment_name or output leaves it alone"
        )
    if wrong := in_the_way(prepared):
        raise AccelError(f"{wrong}: is a folder, where this run writes a file of that name")
    try:
        with (
            refusals_as_errors(),
            joined() as rank,
            run_lock(prepared.folder, *FOLDERS) if rank == 0 else nullcontext(),
        ):
            return training.Run(prepared, chosen, rank, say).train(start, own)
    except FolderInUse as error:
        raise AccelError(f"output={error}") from None


def _of_trial() -> dict[str, Any]:
    """Keys of the yaml that a trial changes, where this process is one."""
    request = trial.current()
    if request is None:
        return {}
    size = {} if request.micro_batch is None else {"batch_size": request.micro_batch}
    return {"output": str(request.run_folder), "progress": False, **size}


def _config(options: dict[str, Any]) -> AccelConfig:
    """The settings, with this plug's own defaults: bf16 where the machine has it, and only the features compiled."""
    chosen = AccelConfig(options.pop("config", None), **options)
    given, own = chosen.given(), {}
    if "precision" not in given:
        own["precision"] = "auto"
    if chosen.compile_scope == "auto":
        own["compile_scope"] = ["FeatureExtraction"]  # type: ignore[assignment]
    return chosen.model_copy(update=own)
