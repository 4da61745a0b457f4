"""Serving, simulated request by request: admission, batches, preemption, memory of GPUs and hosts,
and changes of parallel degrees.
"""
