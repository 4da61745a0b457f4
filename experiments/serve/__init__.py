"""Serving: measured runs, fits of engines, plans for loads, and Seesaw's evaluation."""
