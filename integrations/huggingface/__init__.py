"""What is known of the Hugging Face Trainer: where its loop can be held, its formats, its faults."""
