"""The live page: a local server whose answers follow the user's sliders."""
