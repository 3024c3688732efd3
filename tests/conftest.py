"""Tests run on one thread: with more, torch collapses when another process competes for the cores."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before any is imported
    os.environ.setdefault("WANDB_MODE", "offline")

torch.set_num_threads(1)
