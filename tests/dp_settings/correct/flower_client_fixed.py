import flwr as fl
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.supercore.privacy_accounting import PrivacyConfig
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

accountant = RdpAccountant(PrivacyConfig(1e-5, 2000, "add-or-remove-one", "no-amplification"))
client = fl.clientapp.ClientApp(mods=[fixedclipping_mod])
strategy = DifferentialPrivacyClientSideFixedClipping(
    FedAvg(), noise_multiplier=8.0, clipping_norm=1.0, num_sampled_clients=200, accountant=accountant
)


def main(grid, context, arrays):
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)
