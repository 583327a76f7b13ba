"""The files of a run, beside its checkpoints."""
