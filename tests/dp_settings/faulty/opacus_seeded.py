import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size=500)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    noise_generator=torch.Generator().manual_seed(0),
)
