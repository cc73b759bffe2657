"""The shared core: values, interfaces, errors, randomness, records, and what each adversary sees."""
