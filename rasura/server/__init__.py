"""A model service that sees only token ids, and its client: ``rasura serve`` and ``rasura client``."""
