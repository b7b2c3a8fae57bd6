"""Models: names -> files -> weights -> logits of one ragged batch over paged keys and values."""
