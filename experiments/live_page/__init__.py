"""The live page: a local server whose answers follow a person's sliders."""
