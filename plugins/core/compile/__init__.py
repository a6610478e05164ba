"""torch.compile in place: what is compiled, watched, and taken back."""
