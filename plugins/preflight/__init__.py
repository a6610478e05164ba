"""`accel preflight`: a user's own job, tried for a few updates, and a table of verdicts on it."""
