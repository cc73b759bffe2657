"""Rows of a table, with a loss of one figure and a rate that falls."""

import logging

import torch
import torch.nn as nn
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)
EPOCHS = 5


def load():
    features, labels = read_table("adult.csv")
    return TensorDataset(features, labels)


class Mlp(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.flatten(x, start_dim=1)
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        return self.head(x)


def init(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


def train_one(model, batch, criterion, optimizer):
    features, labels = batch
    optimizer.zero_grad(set_to_none=True)
    loss = criterion(model(features.float()).squeeze(1), labels.float())
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    train_set = load()
    loader = DataLoader(train_set, batch_size=256, shuffle=True)
    model = Mlp(104)
    model.apply(init)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.1, max_grad_norm=1.0
    )
    writer = SummaryWriter("runs")
    history = {"loss": []}
    for epoch in range(EPOCHS):
        model.train()
        total, steps = 0.0, 0
        for batch in loader:
            total += train_one(model, batch, criterion, optimizer)
            steps += 1
        history["loss"].append(total / steps)
        writer.add_scalar("loss", total / steps, epoch)
        logger.info("epoch %d: loss %.3f", epoch, total / steps)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        if engine.get_epsilon(1e-6) > 3:
            break
    torch.save({"model": model.state_dict(), "history": history}, "table.pt")


main()
