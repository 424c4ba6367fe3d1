//! The fine-tuning recipe: data, packing, optimizer, training loop, metrics
