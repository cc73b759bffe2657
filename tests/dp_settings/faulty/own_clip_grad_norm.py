import torch

for batch in loader:
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.grad += torch.randn_like(parameter.grad)
    optimizer.step()
