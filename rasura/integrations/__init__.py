"""Integrations with other libraries: the Trainer of transformers, Flower, Ray."""
