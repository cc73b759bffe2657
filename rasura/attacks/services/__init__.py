"""Embedding inversion: which public tokens the ids of an obfuscated model stand for."""
