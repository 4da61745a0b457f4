"""Plans that go to other frameworks, come from them, and get better by a few changes."""
