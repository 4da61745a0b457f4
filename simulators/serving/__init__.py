"""Serving, played request by request: admission, batches, preemption, memory on GPUs and hosts, and
changes of layouts.
"""
