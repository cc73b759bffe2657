import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator

def train(model, loader, optimizer, criterion, device, epoch):
    model.train()
    losses = []
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i % 100 == 0:
            print(f"epoch {epoch} {i} {loss.item():.3f}")

def test(model, loader, device):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    print(right / len(loader.dataset))

def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = datasets.MNIST(".", train=True, download=True, transform=transforms.ToTensor())
    held = datasets.MNIST(".", train=False, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=64, shuffle=True)
    tests = DataLoader(held, batch_size=1024)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(device)
    model = ModuleValidator.fix(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    engine = PrivacyEngine(secure_mode=True)
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
    for epoch in range(3):
        train(model, loader, optimizer, criterion, device, epoch)
        test(model, tests, device)
        print(engine.get_epsilon(1e-5))
    torch.save(model.state_dict(), "m.pt")

if __name__ == "__main__":
    main()
