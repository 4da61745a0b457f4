"""Commands about given plans: predict, analyse, draw."""
