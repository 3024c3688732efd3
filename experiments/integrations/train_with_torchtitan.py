"""torchtitan with a recipe of this library: its debug model, its trainer, the schedule inside its loop.

    pip install torchtitan        # 0.3
    torchrun --nproc_per_node=1 experiments/integrations/train_with_torchtitan.py

What changes against a plain torchtitan run are the lines that name ``nvfp4_train``. The data are bytes, so that no
tokenizer and no data set is needed.
"""

import dataclasses
from dataclasses import dataclass

import torch
from small_task import LENGTH, Windows
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from nvfp4_train.integrations.torchtitan import NVFP4Converter, ScheduledTrainer

STEPS = 12


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, tokenizer_path: str = ""):
        super().__init__()

    def encode(self, text: str, **options) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **options) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class ByteBatches(BaseDataLoader):
    """Batches of the standard library's bytes, one after another; its state is the place of the next."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, dp_rank: int = 0, dp_world_size: int = 1, local_batch_size: int = 8, **rest):
        self.text, self.size = Windows(8000).rows.flatten(), local_batch_size
        self.next, self.stride = dp_rank * self.size * LENGTH, dp_world_size * self.size * LENGTH

    def __iter__(self):
        shape = (self.size, LENGTH)
        while True:
            tokens = self.text[self.next : self.next + self.size * LENGTH + 1]
            self.next += self.stride
            positions = torch.arange(LENGTH).expand(shape)
            yield {"input": tokens[:-1].reshape(shape), "positions": positions}, tokens[1:].reshape(shape)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def configuration() -> ScheduledTrainer.Config:
    plain = llama3_debugmodel()
    config = ScheduledTrainer.Config(**{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain) if f.init})
    converter = NVFP4Converter.Config(recipe="nvidia_nvfp4_late_fprop")
    config.model_spec = model_registry("debugmodel", converters=[converter])
    config.dataloader, config.tokenizer = ByteBatches.Config(), Bytes.Config()
    config.training.steps, config.training.local_batch_size, config.training.seq_len = STEPS, 8, LENGTH
    config.checkpoint.enable = config.validator.enable = False
    config.dump_folder = "runs/with_torchtitan"
    return config


if __name__ == "__main__":
    trainer = configuration().build()
    try:
        trainer.train()
    finally:
        trainer.close()
