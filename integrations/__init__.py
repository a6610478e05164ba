"""What we know of each host: where its loop can be held, its formats, its faults. Never imports `plugins`."""
