"""The shared core: imports torch and no host."""
