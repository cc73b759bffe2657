from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.server import ServerConfig

CLIP = 0.1
DELTA = 10**-6

app = ClientApp(mods=[LocalDpMod(CLIP, 2 * CLIP, 0.8, DELTA)])
config = ServerConfig(num_rounds=1)
