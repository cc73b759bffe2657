import argparse

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from tqdm import tqdm

EPOCHS = 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.step_size = 3
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def build(dataset):
    model = Net()
    return model


def train(model, optimizer, loader, device, scheduler):
    model.train()
    losses = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=16, optimizer=optimizer) as memory:
        for index, (x, y) in enumerate(tqdm(memory)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    scheduler.step()


def test(model, test_loader):
    model.eval()
    with torch.no_grad():
        for x, y in test_loader:
            print(model(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    train_loader = DataLoader(train_set, batch_size=100, shuffle=True, num_workers=2)
    test_loader = DataLoader(test_set, batch_size=args.test)
    model = build(train_set)
    if not ModuleValidator.is_valid(model):
        model = ModuleValidator.fix(model)
    model = model.to(args.device)
    model.config.pad = 3
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1)
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, train_loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for epoch in range(1, EPOCHS + 1):
        train(model, optimizer, train_loader, args.device, scheduler)
        epsilon = engine.get_epsilon(delta=1e-5)
        print(f"epsilon {epsilon} {len(train_loader)}")
        for group in optimizer.param_groups:
            group["lr"] = 0.1
    test(model, test_loader)
    torch.save(model._module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
