"""Tables of measured collectives: readers, predictions and fits."""
