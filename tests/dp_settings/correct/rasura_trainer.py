from transformers import TrainingArguments

from rasura import PrivateTrainer

arguments = TrainingArguments("out", per_device_train_batch_size=64, num_train_epochs=3)
trainer = PrivateTrainer(model, arguments, train_dataset=data, defense="dp-sgd:1.0/clip=0.5", delta=1e-6)
