"""Membership inference: who was a model trained on? One score a candidate, from what the trained model answers."""
