"""Metrics: how much of the private data a guess contains, with intervals, and the utility of a trained model."""
