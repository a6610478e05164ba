"""What happened: counts, step metrics, the report and its page."""
