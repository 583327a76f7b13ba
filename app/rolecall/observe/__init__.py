"""What can be seen of a run: traces, stacks, page, sinks, report, live display, doctor.

ask.py      Asks the ranks of a running job, by rank 0's METRICS_PORT, with requests that JOB_TOKEN signs
cgroup.py   This process's cgroup: its limits, and whether its memory ran out
probe.py    Queries this rank's endpoint inside its container: the health check
report.py   The report of a run, written beside its checkpoints: summary.json
targets.py  The TARGETs of commands: where rank 0 of a job serves its METRICS_PORT
watch.py    `rolecall watch TARGET`: the live display of a job, from the state that rank 0 streams to its page
doctor/     `rolecall doctor`: checks what a rank needs, and says for each fault what to do
page/       Rank 0's page in the browser, also as one file
sinks/      Sinks write logged values to TensorBoard, MLflow and Weights & Biases, beside the run's history
stacks/     The stacks of all ranks, and who waits for whom
trace/      The spans of all ranks on one time line
"""
