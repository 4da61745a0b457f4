"""Commands that trace models, and that check which types of models can be read."""
