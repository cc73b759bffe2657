import jax_privacy
from jax_privacy import batch_selection, noise_addition

gradients = jax_privacy.clipped_grad(loss, l2_clip_norm=4.0)
privatizer = noise_addition.gaussian_privatizer(stddev=1.1)
batches = batch_selection.CyclicPoissonSampling(sampling_prob=0.01, iterations=1000)
