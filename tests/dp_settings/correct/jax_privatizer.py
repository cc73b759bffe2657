import jax_privacy
from jax_privacy import batch_selection, noise_addition

NOISE_MULTIPLIER = 1.2
gradients = jax_privacy.clipped_grad(loss, l2_clip_norm=0.5, normalize_by=256.0)
privatizer = noise_addition.gaussian_privatizer(stddev=NOISE_MULTIPLIER * gradients.sensitivity())
batches = batch_selection.CyclicPoissonSampling(sampling_prob=0.01, iterations=1000)
