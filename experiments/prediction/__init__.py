"""Given plans - predicted, analysed and drawn."""
