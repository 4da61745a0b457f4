"""Tables of measured collectives: how they are read, predicted, and fitted to."""
