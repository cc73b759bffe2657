"""Attacks: what an adversary makes of an observation. One file for each method, a folder for each family."""
