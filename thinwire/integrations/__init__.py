"""Callbacks for training frameworks: `hf` for transformers' Trainer, `lightning` for Lightning's. Import the one."""
