"""The only importer of diffusers, transformers and accelerate."""
