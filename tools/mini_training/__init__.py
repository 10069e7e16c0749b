"""How mini-zimage is made: data set, training, evaluation, assets (run through tools/train_mini.py)."""
