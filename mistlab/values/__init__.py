"""Values for plans, models and predictions; each checks its fields when it is made."""
