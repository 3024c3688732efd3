"""Accelerate needs no adapter: convert before ``prepare``, and move the schedule before each step.

pip install accelerate
accelerate launch experiments/integrations/train_with_accelerate.py
"""

import torch
from accelerate import Accelerator
from small_task import Windows, small_llama

import nvfp4_train as nt

STEPS, PARTS = 100, 2

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=PARTS)
model = small_llama()
accelerator.print(nt.convert(model, "nvidia_nvfp4_late_fprop"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-3)
data = torch.utils.data.DataLoader(Windows(4000), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
batches = iter(data)
for step in range(STEPS):
    nt.set_progress(model, step, STEPS)  # finds the converted layers inside whatever the model was wrapped in
    for _ in range(PARTS):
        with accelerator.accumulate(model):
            loss = model(**next(batches)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if (step + 1) % 10 == 0:
        accelerator.print(f"step {step + 1}: loss {loss.item():.4f}")
