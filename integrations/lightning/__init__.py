"""What we know of Lightning's Trainer."""
