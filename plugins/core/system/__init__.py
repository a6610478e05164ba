"""The machine and its processes: devices, memory, ranks, signals."""
