"""Sharing tuned engines through the Hugging Face Hub, and what of it may be loaded."""
