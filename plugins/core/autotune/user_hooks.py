"""Hooks that a user put on a model: a trial would run them more often than the run alone does."""

from __future__ import annotations

from typing import Any

from torch import nn

# Their hooks keep nothing of a call that another call would miss or find twice. Those of other packages are taken for a
# user's: a run without a trial is slower at worst.
LIBRARIES = {
    "accelerate", "bitsandbytes", "diffusers", "integrations", "lightning", "peft", "plugins", "pytorch_lightning",
    "timm", "torch", "torchao", "torchvision", "transformers", "ultralytics",
}  # fmt: skip


def hooked(model: nn.Module) -> str:
    """The first module or parameter with a hook of the user's, by name, or empty.

    A hook may keep what it sees in a list, log gradients, or step an optimizer in the backward.
    """
    for name, module in model.named_modules():
        kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(_of_the_user(hook) for hooks in kinds for hook in hooks.values()):
            return name or type(module).__name__
    for name, parameter in model.named_parameters():
        found = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if any(_of_the_user(hook) for hooks in found for hook in (hooks or {}).values()):
            return name
    return ""


def _of_the_user(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).partition(".")[0] not in LIBRARIES
