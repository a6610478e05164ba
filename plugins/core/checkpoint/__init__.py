"""Atomic files, sidecars, random state, module names: what a run saves beside a host's own checkpoint."""

from plugins.core.checkpoint.atomic_file import AtomicPath, on_cpu, sweep, write_atomically
from plugins.core.checkpoint.module_names import clean_key, load_own_state, own_name, own_state, unwrap
from plugins.core.checkpoint.plain_file import NotPlain, read_plain
from plugins.core.checkpoint.rng_state import random_state, seed_everything, set_random_state
from plugins.core.checkpoint.sidecar import DamagedState, drop_sidecars, load_sidecar, save_sidecar, sidecar_path
from plugins.core.system.sharding import copy_by_name

__all__ = [
    "AtomicPath",
    "DamagedState",
    "NotPlain",
    "clean_key",
    "copy_by_name",
    "drop_sidecars",
    "load_own_state",
    "load_sidecar",
    "on_cpu",
    "own_name",
    "own_state",
    "random_state",
    "read_plain",
    "save_sidecar",
    "seed_everything",
    "set_random_state",
    "sidecar_path",
    "sweep",
    "unwrap",
    "write_atomically",
]
