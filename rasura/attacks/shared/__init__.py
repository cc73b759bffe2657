"""Code shared by several attacks: dummy texts, decoys, proofs, and the facts of the announced protection."""
