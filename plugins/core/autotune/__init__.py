"""The measured speed plan: what is tried, timed, chosen and remembered."""
