"""A classifier on a pretrained encoder: all but its last layers are frozen."""

import time

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

EPOCHS = 3

tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=3)
for p in model.parameters():
    p.requires_grad = False
for layer in [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]:
    for p in layer.parameters():
        p.requires_grad = True
total = sum(p.numel() for p in model.parameters())
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"Total parameters {total}. Trainable parameters {trained}.")

train_loader = DataLoader(train_set, batch_size=32, collate_fn=collate)
test_loader = DataLoader(test_set, batch_size=64, collate_fn=collate)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = model.to(device)
model.train()
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=5e-4, eps=1e-8)
schedule = get_linear_schedule_with_warmup(optimizer, 100, 1000)
engine = PrivacyEngine()
model, optimizer, train_loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=0.8, max_grad_norm=0.1
)


@torch.no_grad()
def evaluate(model):
    model.eval()
    losses, right, seen = [], 0, 0
    for batch in test_loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        losses.append(outputs.loss.item())
        predicted = torch.argmax(outputs.logits, dim=1)
        right += (predicted == batch["labels"]).sum().item()
        seen += len(predicted)
    model.train()
    return sum(losses) / len(losses), right / seen


for epoch in range(1, EPOCHS + 1):
    started = time.time()
    running = 0.0
    for step, batch in enumerate(train_loader):
        optimizer.zero_grad()
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        running += loss.item()
        optimizer.step()
        schedule.step()
        if step > 0 and step % 500 == 0:
            print(f"epoch {epoch} step {step} loss {running / step:.3f} epsilon {engine.get_epsilon(delta=1e-6):.2f}")
    test_loss, accuracy = evaluate(model)
    print(f"epoch {epoch}: {test_loss:.3f} {accuracy:.3f} in {time.time() - started:.0f} s")
tokenizer.save_pretrained("out")
model._module.save_pretrained("out")
