from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAdam(eta=1.0), noise_multiplier=10.0, clipping_norm=0.2, num_sampled_clients=100
    )
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)
