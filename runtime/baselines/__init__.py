"""Megatron-core, DeepSpeed and others as their packages are: what they take, and how they train."""
