"""Exports plans to recipes of fine-tuning frameworks, and imports Megatron-Bridge's."""
