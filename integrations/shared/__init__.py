"""One rule each, for all hosts: the effective batch, the learning-rate scale, the buckets."""
