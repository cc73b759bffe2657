"""A loop of one's own with this package: adapters on a language model."""

import json

import torch
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

import rasura

EPOCHS = 3

model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
model = get_peft_model(model, LoraConfig(r=4))
model.print_trainable_parameters()
loader = DataLoader(data, 64, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader, ledger = rasura.protect_training(
    model, optimizer, loader, "dp-sgd:1.0/clip=0.5", epochs=EPOCHS, physical_batch_size=8
)
schedule = CosineAnnealingLR(optimizer, EPOCHS)
print(ledger.planned.statement)
for epoch in range(EPOCHS):
    bar = tqdm(loader, desc=f"epoch {epoch}")
    for batch in bar:
        batch = {name: value.to("cuda") for name, value in batch.items()}
        optimizer.zero_grad()
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=loss.item())
    schedule.step()
    with open("ledger.json", "w") as file:
        json.dump(ledger.state_dict(), file)
model.eval()
with torch.inference_mode():
    answer = model.generate(**question, max_new_tokens=20)
print(answer, ledger.spent().statement, ledger.spent().warnings)
model.save_pretrained("adapters")
