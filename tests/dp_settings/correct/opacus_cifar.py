"""The tutorial of Opacus on CIFAR10, with batches that are divided for the memory."""

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torchvision import models, transforms
from torchvision.datasets import CIFAR10

MAX_GRAD_NORM = 1.2
DELTA = 1e-5
EPOCHS = 20
BATCH_SIZE = 512
MAX_PHYSICAL_BATCH_SIZE = 128

transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.2,))])
train_dataset = CIFAR10(root="../cifar10", train=True, download=True, transform=transform)
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=BATCH_SIZE)
test_dataset = CIFAR10(root="../cifar10", train=False, download=True, transform=transform)
test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=BATCH_SIZE, shuffle=False)

model = models.resnet18(num_classes=10)
errors = ModuleValidator.validate(model, strict=False)
print(errors[-5:])
model = ModuleValidator.fix(model)
ModuleValidator.validate(model, strict=False)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = model.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.RMSprop(model.parameters(), lr=1e-3)


def accuracy(preds, labels):
    return (preds == labels).mean()


privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.0,
    max_grad_norm=MAX_GRAD_NORM,
)
print(f"Using C={MAX_GRAD_NORM}")


def train(model, train_loader, optimizer, epoch, device):
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses = []
    top1_acc = []
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=MAX_PHYSICAL_BATCH_SIZE, optimizer=optimizer
    ) as memory_safe_data_loader:
        for i, (images, target) in enumerate(memory_safe_data_loader):
            optimizer.zero_grad()
            images = images.to(device)
            target = target.to(device)
            output = model(images)
            loss = criterion(output, target)
            preds = np.argmax(output.detach().cpu().numpy(), axis=1)
            labels = target.detach().cpu().numpy()
            acc = accuracy(preds, labels)
            losses.append(loss.item())
            top1_acc.append(acc)
            loss.backward()
            optimizer.step()
            if (i + 1) % 200 == 0:
                epsilon = privacy_engine.get_epsilon(DELTA)
                print(
                    f"\tTrain Epoch: {epoch} \t"
                    f"Loss: {np.mean(losses):.6f} "
                    f"Acc@1: {np.mean(top1_acc) * 100:.6f} "
                    f"(epsilon = {epsilon:.2f}, delta = {DELTA})"
                )


def test(model, test_loader, device):
    model.eval()
    criterion = nn.CrossEntropyLoss()
    losses = []
    top1_acc = []
    with torch.no_grad():
        for images, target in test_loader:
            images = images.to(device)
            target = target.to(device)
            output = model(images)
            loss = criterion(output, target)
            preds = np.argmax(output.detach().cpu().numpy(), axis=1)
            labels = target.detach().cpu().numpy()
            acc = accuracy(preds, labels)
            losses.append(loss.item())
            top1_acc.append(acc)
    top1_avg = np.mean(top1_acc)
    print(f"\tTest set:Loss: {np.mean(losses):.6f} Acc: {top1_avg * 100:.6f} ")
    return np.mean(top1_acc)


for epoch in range(EPOCHS):
    train(model, train_loader, optimizer, epoch + 1, device)
top1_acc = test(model, test_loader, device)
