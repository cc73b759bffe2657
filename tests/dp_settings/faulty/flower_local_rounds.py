from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.server import ServerConfig

app = ClientApp(mods=[LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=0.9, delta=1e-6)])
config = ServerConfig(num_rounds=100)
