"""Metrics: how much of the private data a guess holds, with intervals, and what a trained model is worth."""
