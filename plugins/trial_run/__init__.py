"""A trial of the user's own command: in a child process, with the plug in it, and stopped after a few updates.

`launch.run(command, TrialRequest(...))` is the parent's side (`launch.py`), `child.py` the child's. The request
goes to the child as a JSON file, which one environment variable names; what happens there comes back as JSON lines.
"""
