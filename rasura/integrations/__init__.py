"""Other libraries that training runs in: the Trainer of transformers, Flower, Ray."""
