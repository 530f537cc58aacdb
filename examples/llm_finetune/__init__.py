"""Fine-tuning of a Hugging Face model: full or with LoRA, by an ordinary LightningModule and by the same in stages."""
