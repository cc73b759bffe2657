"""A model service that sees token ids alone, and its client: ``rasura serve`` and ``rasura client``."""
