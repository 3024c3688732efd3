"""What the examples train: a small Llama on the bytes of Python's own standard library. Nothing is downloaded."""

import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 64


class Windows(torch.utils.data.Dataset):
    """``input_ids`` and ``labels``, int64 [LENGTH], cut from the sources one after another."""

    def __init__(self, count: int):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: count * LENGTH]
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().reshape(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def small_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
            initializer_range=0.08,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )  # fmt: skip
    )
