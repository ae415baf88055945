"""Trainers: Hugging Face's, with data that is right and wrong."""

from attach.situations import Situation

TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
model = LlamaForCausalLM(config)
rows = torch.randint(2, 64, (96, 12))
samples = [{"input_ids": row, "labels": LABELS} for row in rows]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=12, report_to="none", use_cpu=True,
    disable_tqdm=True, OPTIONS
)
Trainer(model, arguments, train_dataset=samples, CALLBACKS).train()
"""
COPIED = "torch.cat([row[:1], row[:-1]])"
TWICE = "torch.cat([row[1:], torch.tensor([-100])])"


def trained(labels: str = "row", options: str = "", callbacks: str = "") -> str:
    """Return a script with Hugging Face's Trainer."""
    script = TRAINER.replace("LABELS", labels).replace("OPTIONS", options)
    return script.replace("CALLBACKS", callbacks)


CASES = {
    "right labels": ("row", "", 0, ()),
    "labels that make the model copy its input": (COPIED, "", 2, ("GS604",)),
    "labels that the collator shifts too": (TWICE, "", 2, ("GS612",)),
    "no label that counts": ("row * 0 - 100", "", 2, ("GS606",)),
    "a learning rate of 3": ("row", "learning_rate=3.0, warmup_steps=0", 1, ("GS401",)),
}

SITUATIONS = [
    Situation(
        f"Hugging Face's Trainer: {name}",
        trained(labels, options),
        exit_code=code,
        findings=findings,
        says=["where you make the TrainingArguments", "learning_rate=0.275"] if options else [],
        not_skipped=["GS601", "GS602", "GS604", "GS607"] if code == 0 else [],
        preload=["transformers"],
        slow=True,
    )
    for name, (labels, options, code, findings) in CASES.items()
]
