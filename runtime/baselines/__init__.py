"""Baselines: Megatron-core, DeepSpeed and other systems' own packages, checked and run."""
