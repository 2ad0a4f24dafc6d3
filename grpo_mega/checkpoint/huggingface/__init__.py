"""Models in the form of Hugging Face transformers: names and shapes, configuration, directories of safetensors."""
