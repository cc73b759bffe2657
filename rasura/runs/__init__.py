"""Everything that runs: audits, membership, services, training, calibration, reading, and their plans."""
