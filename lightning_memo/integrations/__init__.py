"""Training outside of Lightning: in a loop of one's own, and in the Trainer of Hugging Face."""
