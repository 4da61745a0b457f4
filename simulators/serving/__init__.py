"""Serving, played request by request: admission, batches, preemption, tiers, transitions."""
