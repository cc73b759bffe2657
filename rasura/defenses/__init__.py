"""Defenses: transforms of the data, the model, the gradients or the message, and how they are chained."""
