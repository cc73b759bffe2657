import rasura

model, optimizer, loader, ledger = rasura.protect_training(model, optimizer, loader, "dp-sgd:1.0", epochs=3, seed=7)
