"""Ultralytics: where its command and its trainer can be held."""
