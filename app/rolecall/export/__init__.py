"""Checkpoints evaluated and exported: `rolecall eval` and `rolecall export`.

saved        a checkpoint with its job and settings; flags, errors of a job's functions
evaluation   `rolecall eval`
exporting    `rolecall export`
exported     what a job's `export` function returns
formats      safetensors, torch.export's program, ONNX
agreement    the outputs of the file compared with the checkpoint's
card         the model card
"""
