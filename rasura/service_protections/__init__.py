"""Protections of a model service: ObfusLM and the methods that it is compared with."""
