"""Protections of a model service: ObfusLM, and what it is compared to."""
