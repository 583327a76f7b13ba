"""Runs `regression.onnx`, which `rolecall export examples/regression.py --format onnx` writes, without Rolecall."""

# region load
import numpy
import onnxruntime

session = onnxruntime.InferenceSession("regression.onnx")
(values,) = session.run(None, {"points": numpy.array([[1.0, 0.5], [0.5, 2.0]], "float32")})
print(values)
# endregion
