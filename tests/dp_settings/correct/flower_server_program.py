"""A Flower server whose strategy is FedProx, which averages as FedAvg does."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedProx

app = ServerApp()


@app.main()
def main(grid, context):
    average = FedProx(fraction_train=0.1, min_available_nodes=100, proximal_mu=0.1)
    strategy = DifferentialPrivacyServerSideFixedClipping(
        average, noise_multiplier=10.0, clipping_norm=0.2, num_sampled_clients=100
    )
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(initial()), num_rounds=10)
    result.arrays.save("model.npz")
