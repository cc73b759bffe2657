from jax_privacy import noise_addition

privatizer = noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0)
