"""Tables of measured collectives: read, predicted, and fitted."""
