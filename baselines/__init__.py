"""Baseline methods: one short file each, what it changes against GRPO."""
