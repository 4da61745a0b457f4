"""The library: questions as functions with typed answers, exported by ``mistlab``."""
