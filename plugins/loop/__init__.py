"""The plug of any PyTorch loop: `Accelerated`."""

from plugins.loop.accelerated import Accelerated

__all__ = ["Accelerated"]
