"""Model architectures: their hyperparameters and, one file each, their forward passes."""
