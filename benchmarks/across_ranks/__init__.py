"""Parts of what runs on several ranks: distributed.py, self_test.py, million_tokens.py, many_gpus.py."""
