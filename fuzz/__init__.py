"""Fuzzing of everything that reads what strangers send: ``python -m fuzz --inputs 1000000``.

A mutational fuzzer on seeds that the package's own writers make. Input ``k`` of a target follows from the seeds, the run's
seed and ``k`` alone, so a run can be stopped, continued and repeated. Allowed is ``InputError``; anything else, a
request that is answered by 500, and memory that grows, is a failure whose input is kept.
"""
