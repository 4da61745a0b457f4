"""Commands that trace models, and that check model types."""
