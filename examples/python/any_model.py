"""Trains a model of Hugging Face's transformers as a pipeline, as it is: with tied weights and a mask that all layers
share."""

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import gpipe

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
tokens = torch.arange(32) * torch.arange(1, 17)[:, None] % 64  # 16 sequences, each with a step of its own

pipe = gpipe.GPipe.from_module(
    model, kwargs={"input_ids": tokens, "use_cache": False}, stages=2, chunks=4, schedule="1f1b"
)
print("layers per stage:", pipe.balance)


def criterion(output, ids):
    return cross_entropy(output.logits[:, :-1].mT, ids[:, 1:])


optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
for step in range(40):
    optimizer.zero_grad()
    loss = pipe.step({"input_ids": tokens}, tokens, criterion)
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")

model.eval()  # has the trained weights
print("continued:", model.generate(tokens[2:3, :4], attention_mask=torch.ones(1, 4), max_new_tokens=4)[0].tolist())
