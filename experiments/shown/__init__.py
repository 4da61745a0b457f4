"""Shows finished runs on one page."""
