"""The Ultralytics plug: `yolo train … callbacks=plugins.yolo`, or `attach(model)` from Python.

`callbacks` is a dict of event -> function, as in Ultralytics' own integrations. `python -m plugins.yolo train …`
is the `yolo` command with this plug in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from plugins.config import AccelConfig
from plugins.errors import AccelError, refusals_as_errors
from plugins.trial_run import request as trial

HOST = "ultralytics"
HOST_BATCH = 16  # of a command that gives none
TUNES_ALONE = (
    "accel: tune trains in subprocesses of the host, which get no callbacks: its trainings run without plugins.yolo"
)
Callback = Callable[[Any], None]
_log = logging.getLogger("ultralytics")


def start(trainer: Any, options: Mapping[str, Any] | None = None) -> None:
    """`on_pretrain_routine_end`: take hold of the trainer. Fires on every rank, in worker processes too."""
    if getattr(trainer, "accel", None) is not None:
        return
    from integrations.ultralytics.adapter import Adapter
    from integrations.ultralytics.checkpointing import find_state
    from plugins.core import checkpoint
    from plugins.host_tools import host_tools

    damaged = ""
    try:
        state = find_state(trainer, checkpoint)
    except checkpoint.DamagedState as error:
        state, damaged = None, f"{error}; "
    given = AccelConfig(**(options or {})).given()
    kept = dict((state or {}).get("config", {}))
    if {"accumulate", "effective_batch"} & given.keys():  # one replaces the other
        kept = {k: v for k, v in kept.items() if k not in ("accumulate", "effective_batch")}
    config = AccelConfig(**{**kept, **given})
    check(config, {})
    if state is not None:
        _log.info(f"accel: resuming live weights, optimizer, window and random state; settings {config.given()}")
    adapter = Adapter(trainer, host_tools(config, HOST, _log.warning, ("ultralytics", "torchvision")))
    with refusals_as_errors(), adapter.released_on_error():
        adapter.hold(state)
    session = adapter.session
    if trainer.resume and state is None:
        why = damaged or "no extra state lies beside this checkpoint: "
        session.warn(f"{why}resuming from the averaged weights, as the host")
    trainer.accel = adapter
    facts = session.report.window
    _log.info(
        f"accel: {facts.accumulate} x {facts.micro_batch} = {facts.effective_batch} images an update, "
        f"{session.report.compile.decision}"
    )


def saved(trainer: Any) -> None:
    """`on_model_save`: the report as it stands, so that a killed run has one."""
    _write_report(trainer)


def finish(trainer: Any) -> None:
    """`teardown`, on errors too: write the report and give the trainer back."""
    adapter = getattr(trainer, "accel", None)
    if adapter is None:
        return
    trainer.accel = None
    adapter.release()
    path = _write_report(trainer, adapter)
    adapter.session.end()
    if path is not None:
        _log.info(f"accel: report {path.with_suffix('.html')}")


def _write_report(trainer: Any, adapter: Any = None) -> Path | None:
    from integrations.ultralytics.checkpointing import writes_report

    adapter = adapter or getattr(trainer, "accel", None)
    if adapter is None or not writes_report():
        return None
    try:
        path: Path = adapter.session.write_report(Path(trainer.save_dir))
    except OSError as error:
        adapter.session.warn(f"report not written: {error}")
        return None
    return path


def configure(options: Mapping[str, Any], host_args: Mapping[str, Any] | None = None) -> dict[str, Callback]:
    """Callbacks for these settings, checked against the host's own arguments before anything is written.

    Args:
        options: fields of AccelConfig.
        host_args: the arguments of a command, as the host reads them; None where they are not known yet.

    Returns:
        Event -> function, as the host takes them.

    Raises:
        AccelError: one line that names the field, the value and what is allowed.
    """
    given = dict(host_args or {})
    if host_args is not None and not {"resume", "cfg"} & given.keys():  # else the batch comes from a file
        given.setdefault("batch", HOST_BATCH)
    check(AccelConfig(**options), given)
    if given.get("mode") == "tune":
        _log.warning(TUNES_ALONE)
    begin = partial(start, options=dict(options))
    begin.first = True  # type: ignore[attr-defined]  # see integrations.ultralytics.command.on_every_model
    return {**callbacks, "on_pretrain_routine_end": begin}


def host_arguments() -> dict[str, Any]:
    """Arguments of the host's that a trial changes, where this process is one; laid over those of its command."""
    request = trial.current()
    if request is None:
        return {}
    size = {} if request.micro_batch is None else {"batch": request.micro_batch}
    return {"project": str(request.folder.absolute()), "name": request.run_folder.name, "exist_ok": True, **size}


def check(config: AccelConfig, host_args: Mapping[str, Any]) -> None:
    """Contradictions between the settings and the host's arguments.

    Raises:
        AccelError
    """
    if config.batchnorm == "precise":
        raise AccelError("batchnorm=precise: not for Ultralytics; allowed are host, momentum, freeze")
    if host_args.get("compile"):
        raise AccelError(
            f"compile={host_args['compile']}: the host's own compile and the plug exclude each other; "
            "leave compile out and set accel.compile=on"
        )
    if host_args.get("distill_model"):
        raise AccelError("distill_model: not served by plugins.yolo; leave out callbacks=plugins.yolo")
    if isinstance(config.plan, Path):
        from plugins.core.autotune.plan_file import check_plan_file  # late: imports torch

        check_plan_file(config)
    if config.precision == "fp16" and str(host_args.get("device", "")) in ("", "cpu"):
        _check_fp16(str(host_args.get("device", "")))
    batch = host_args.get("batch")
    if config.effective_batch != "host" and isinstance(batch, int) and batch > 0:
        from integrations.ultralytics.schedule import window_size

        with refusals_as_errors():
            window_size(config, batch)


def _check_fp16(device: str) -> None:
    from plugins.core.system import devices

    if device == "cpu" or not devices.accelerator():
        raise AccelError("precision=fp16: not on a CPU; allowed here are host, auto, fp32, bf16")


def attach(model: Any, **options: Any) -> Any:
    """Plug into an Ultralytics model from Python: `attach(YOLO(…), accumulate=4).train(…)`.

    Attaching again replaces the settings.

    Args:
        model: a `YOLO` or `RTDETR`.
        **options: fields of AccelConfig; `config` names an accel.yaml.

    Returns:
        The same model.

    Raises:
        AccelError: an unknown field, a bad value, two contradicting fields, something that is no such model.
    """
    if not hasattr(model, "callbacks"):
        raise AccelError(f"attach: {str(model)[:60]} is no Ultralytics model; expected one such as YOLO('yolov8n.pt')")
    ours = (start, saved, finish)
    for event, function in configure(options).items():
        kept = [f for f in model.callbacks[event] if getattr(f, "func", f) not in ours]
        # First: what users' callbacks set, also on a resume, comes after what is put back here, as with the host.
        model.callbacks[event] = [function, *kept]
    model.tune = partial(_tune, model)
    if host_arguments():
        model.train = partial(_train, model)
    return model


def _train(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's own `train`, as a trial changes it."""
    return type(model).train(model, *args, **{**kwargs, **host_arguments()})


def _tune(model: Any, use_ray: bool = False, *args: Any, **kwargs: Any) -> Any:
    """The host's own `tune`, which trains in commands of its own, without the callbacks of this model."""
    if not use_ray:
        _log.warning(TUNES_ALONE)
    return type(model).tune(model, use_ray, *args, **kwargs)


callbacks: dict[str, Callback] = {
    "on_pretrain_routine_end": start,
    "on_model_save": saved,
    "teardown": finish,
}

if __name__ == "__main__":
    import sys

    from integrations.ultralytics.command import main

    main(sys.argv, ["plugins.yolo"])
