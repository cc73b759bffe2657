"""Victims: the models under attack, how they are loaded, and the step whose update is sent."""
