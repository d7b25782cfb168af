"""Evaluation of checkpoints: loading, held-out cross-entropy, lm-eval, releases and export to Hugging Face's format."""
