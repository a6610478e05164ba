"""A trial of the user's own command: in a child process, with the plug in it, and stopped after a few updates.

`run(command, TrialRequest(...))` is the parent's side (`launch.py`), `child.py` the child's. The request goes to the
child as a JSON file, which one environment variable names; what happens there comes back as JSON lines.
"""

from plugins.trial_run.launch import Ended, TrialResult, run
from plugins.trial_run.request import TrialRequest

__all__ = ["Ended", "TrialRequest", "TrialResult", "run"]
