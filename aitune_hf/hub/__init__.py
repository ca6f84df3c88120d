"""Sharing tuned engines: through the Hugging Face Hub, or any other store of files.

The only importer of ``huggingface_hub``, which is imported when a repository is used.
"""
