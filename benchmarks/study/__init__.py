"""Parts of scaling.py and scaling_report.py, the emulated study of many GPUs."""
