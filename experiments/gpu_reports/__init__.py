"""Pictures, tables and pages of what was predicted and measured."""
