"""`accel find-batch`: the largest micro-batch that fits, and what to give up where none does.

`search.py` decides what to measure, `trials.py` measures it, `rescue.py` is for where nothing fits, `advice.py` writes
the command to use, `presets.py` forecasts without a measurement; `command_line.py` is what the user sees.
"""
