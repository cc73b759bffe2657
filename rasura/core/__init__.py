"""What every room speaks of: values, interfaces, errors, randomness, records, and the door to the adversary."""
