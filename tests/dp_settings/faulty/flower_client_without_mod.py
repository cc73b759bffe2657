from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

client = ClientApp()
strategy = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, 100)
