"""Parts of what runs on one rank: kernels.py, block_times.py, mask_costs.py, repeatability.py, sanitize.py"""
