"""Lightning with a recipe that goes back to BF16 late, without a restart.

pip install lightning
python experiments/integrations/train_with_lightning.py
"""

import lightning as L
import torch
from small_task import Windows, small_llama

from nvfp4_train.integrations.lightning import NVFP4Callback


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = small_llama()

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2.5e-3)


callback = NVFP4Callback("nvidia_nvfp4_late_fprop", part="model", seed=1)
trainer = L.Trainer(
    max_steps=100, precision="bf16-mixed", callbacks=[callback], logger=False, default_root_dir="runs/with_lightning"
)
trainer.fit(Model(), torch.utils.data.DataLoader(Windows(4000), batch_size=8))
print(callback.report)
