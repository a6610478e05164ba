"""EasyOCR 1.7: its official configuration, data, networks, weights and what its Reader loads."""
