"""Commands about serving: measured runs, fits, plans for a load, and Seesaw's evaluation."""
