from opacus import PrivacyEngine
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size=256, shuffle=True)
engine = PrivacyEngine(secure_mode=True)
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=3.0,
    target_delta=1e-6,
    epochs=5,
    max_grad_norm=1.0,
)
