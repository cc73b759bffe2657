"""What several attacks share: dummy texts, decoys, proofs, and what the announced protection tells."""
