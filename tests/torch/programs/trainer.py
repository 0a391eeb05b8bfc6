"""A small GPT-2 under Hugging Face's Trainer, which knows Gloo alone on processors."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
config = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
texts = torch.randint(31, (64, 16), generator=torch.Generator().manual_seed(1))
rows: Any = [{"input_ids": text, "labels": text} for text in texts]
arguments = TrainingArguments(
    sys.argv[1], use_cpu=True, num_train_epochs=3, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
    save_steps=5, logging_steps=1000, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
if dist.get_rank() == 0:
    print(f"backend {dist.get_backend()}, of {dist.get_world_size()} ranks, loss {loss:.6f}")
dist.destroy_process_group()
