"""ObfusLM: a model whose tokens and rows only its owner can identify, for a service that must not see text (Lin et al.)."""
