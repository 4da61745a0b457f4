"""The library: questions as functions with typed answers, which ``mistlab`` offers by name."""
