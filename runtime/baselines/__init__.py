"""Baselines: other systems (Megatron-core, DeepSpeed, FSDP2) as installed packages, checked and
run.
"""
