"""Baselines: other training systems (Megatron-core, DeepSpeed, FSDP2), checked and run as installed
packages.
"""
