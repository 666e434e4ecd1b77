"""What is done to a model: LoRA injection, losses."""
