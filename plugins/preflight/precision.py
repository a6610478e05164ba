"""Precision, its scaler, where autocast and compile stand, and BatchNorm's micro-batches."""

from __future__ import annotations

from plugins.preflight.trials import Trials
from plugins.preflight.verdict import Finding, Verdict, finding, skipped

HALF = ("float16", "bfloat16")
SMALL, TINY = 8, 2  # samples that BatchNorm sees


def placed(trials: Trials) -> Finding:
    """Forward and loss inside autocast, backward and step outside; the weights in fp32; nobody else's compile."""
    first, check = trials.first, "autocast and compile placed rightly"
    seen, weights = first.fact("placement"), first.fact("weights") or {}
    if seen is None:
        return skipped(check, "no update")
    halves = sum(weights.get(dtype, 0) for dtype in HALF)
    inside = f"forward in {seen.get('autocast') or 'fp32'}"
    if halves:
        return finding(
            check,
            Verdict.WARN,
            f"{halves} weights are half precision themselves",
            "keep fp32 weights and use autocast (precision=bf16): small updates are rounded away otherwise",
        )
    if seen.get("step_in_autocast"):
        return finding(check, Verdict.FAIL, f"{inside}, and the step too", "leave autocast before backward and step")
    if first.fact("compiled_by_owner"):
        return finding(
            check,
            Verdict.WARN,
            f"{inside}; the model is compiled by its owner",
            "give the bare model: compile=auto measures it",
        )
    return finding(check, Verdict.PASS, f"{inside}; step outside")


def scaler(trials: Trials) -> Finding:
    """fp16 needs a gradient scaler; bf16 does not, where the device is fast in it."""
    first, check = trials.first, "scaler or bf16 as the device wants"
    seen = first.fact("placement")
    if seen is None:
        return skipped(check, "no update")
    dtype, scaled, fast = seen.get("autocast") or "float32", first.fact("scaler"), first.fact("fast_bf16")
    device = (first.fact("begun") or {}).get("device", "cpu")
    figure = (
        f"{dtype} on {device}, {'with' if scaled else 'without'} a scaler, bf16 {'fast' if fast else 'not fast'} here"
    )
    if dtype == "float16" and not scaled:
        return finding(check, Verdict.FAIL, figure, "add torch.amp.GradScaler, or precision=bf16")
    if dtype == "float16" and fast:
        return finding(check, Verdict.WARN, figure, "precision=bf16 needs no scaler and skips no update")
    if dtype == "bfloat16" and not fast:
        return finding(check, Verdict.WARN, figure, "precision=host or fp32: bf16 is emulated on this device")
    if dtype == "float32" and fast and device != "cpu":
        return finding(check, Verdict.WARN, figure, "precision=bf16 would be faster and smaller here")
    return finding(check, Verdict.PASS, figure)


def batchnorm(trials: Trials) -> Finding:
    """The samples that BatchNorm normalises over are a micro-batch's, whatever the effective batch."""
    first, check = trials.first, "micro-batch against BatchNorm"
    layers, held = (first.fact("placement") or {}).get("batchnorm", [0, 0])
    if not layers:
        return finding(check, Verdict.PASS, "no BatchNorm layer")
    rule, size = first.report["batchnorm"]["rule"], trials.window["micro_batch"]
    if rule == "freeze":
        return finding(check, Verdict.PASS, f"{layers} layers, frozen")
    if held == layers:
        return finding(
            check,
            Verdict.FAIL,
            f"all {layers} layers are in eval mode while they are trained",
            "call accel.train() (model.train()) before training, or say batchnorm=freeze",
        )
    figure = f"{layers} layers see {size} samples at a time"
    if size <= TINY:
        return finding(
            check, Verdict.FAIL, figure, "a larger micro-batch, batchnorm=freeze (fine-tuning), or GroupNorm"
        )
    if size < SMALL:
        return finding(check, Verdict.WARN, figure, f"a micro-batch of {SMALL} or more, or batchnorm=freeze")
    if trials.accumulate > 1 and rule == "host":
        figure += f"; running statistics move {trials.accumulate} times an update"
        return finding(check, Verdict.PASS, f"{figure} (batchnorm=momentum: once)")
    return finding(check, Verdict.PASS, figure)
