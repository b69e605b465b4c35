"""Training a feature-head draft for a target: data from the target itself, training, evaluation, a folder with a card."""
