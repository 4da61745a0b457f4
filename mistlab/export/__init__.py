"""Plans in the words of other frameworks: what a target can say of a plan, its text, and back."""
