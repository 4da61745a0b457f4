"""Values that plans, machines and predictions are made of, each checked when it is made."""
