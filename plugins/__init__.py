"""accel-plugins: faster training, and batches that do not fit in memory, plugged into a host by one line.

`AccelConfig` holds the settings of every plug; `AccelCallback` is the Hugging Face plug. Importing this
package imports no host and not even torch: both names load when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plugins.config import AccelConfig as AccelConfig
    from plugins.errors import AccelError as AccelError

__version__ = "0.2.0"
__all__ = ["AccelCallback", "AccelConfig", "AccelError", "__version__"]

_HOME = {
    "AccelCallback": "plugins.hf",
    "AccelConfig": "plugins.config",
    "AccelError": "plugins.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'plugins' has no attribute {name!r}")
