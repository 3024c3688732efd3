"""transformers.Trainer with a recipe that goes back to BF16 late, without a restart.

pip install accelerate
python experiments/integrations/train_with_transformers.py
"""

import torch
from small_task import Windows, small_llama
from transformers import Trainer, TrainingArguments

from nvfp4_train.integrations.transformers_trainer import set_up

arguments = TrainingArguments(
    output_dir="runs/with_transformers", max_steps=100, per_device_train_batch_size=8, learning_rate=2.5e-3,
    logging_steps=10, save_steps=50, report_to=[], bf16=torch.cuda.is_available(),
)  # fmt: skip
trainer = Trainer(small_llama(), arguments, train_dataset=Windows(4000))
print(set_up(trainer, "nvidia_nvfp4_late_fprop"))
trainer.train()
