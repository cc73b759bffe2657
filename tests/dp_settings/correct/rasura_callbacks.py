"""Hugging Face's Trainer with this package, and an evaluation on other texts."""

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    TrainingArguments,
)

from rasura import PrivateTrainer


def accuracy(outcome):
    return {"accuracy": float((outcome.predictions.argmax(-1) == outcome.label_ids).mean())}


def main():
    tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
    data = load_dataset("imdb")
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=32,
        gradient_accumulation_steps=8,
        num_train_epochs=3,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="no",
    )
    trainer = PrivateTrainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        compute_metrics=accuracy,
        callbacks=[PrinterCallback()],
        defense="dp-sgd:1.0",
    )
    trainer.train()
    print(trainer.evaluate(), trainer.guarantee.statement)
    trainer.save_model("out")


if __name__ == "__main__":
    main()
