"""Stages joined to pipelines: which candidates a stage has, and which of them go together best."""
