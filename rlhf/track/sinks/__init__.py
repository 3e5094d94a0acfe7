"""Mirrors of the journal: console, TensorBoard, SwanLab, wandb."""
