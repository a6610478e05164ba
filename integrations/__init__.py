"""What is known of each host: where its training loop can be held, its formats, its faults. Imports no plug."""
