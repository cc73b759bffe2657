"""ObfusLM: a model whose tokens and rows only its owner can name, for a service that is not to see text (Lin et al.)."""
