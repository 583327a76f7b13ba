"""What users see of a run.

page       the page in the browser
sinks      TensorBoard, MLflow, Weights & Biases
trace      traces
stacks     stacks of all ranks
doctor     `rolecall doctor`
display    the live terminal display
viewer     `rolecall watch`
targets    the TARGETs of commands
ask        signed requests to rank 0
report     summary.json and the learning curve's picture
picture    the process that draws it
memory     the memory of a rank's cgroup
probe      the health check in a container
"""
