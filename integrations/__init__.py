"""What the project knows of each host: where its loop can be held, its formats, its faults. Imports no plug."""
