"""The trainer behind `thinwire train`: config, data, models, loop, checkpoints and launch modes."""
