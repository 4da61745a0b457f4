"""Commands that take a plan: they predict, analyse or draw it."""
