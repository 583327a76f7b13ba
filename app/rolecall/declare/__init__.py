"""What the author of a job declares, and how it is found. Nothing here imports torch.

spec                the declaration: roles, settings, metrics
registry            names of jobs, and the rank of a process
loader              loads a user's file or module, and locates its errors
sources             the source as it was at the start, for all processes
describe            a job's description for processes without torch
flags               the flags of `rolecall run JOB`
preflight           checks a user's source before anything starts
remote              which functions peers can call
plain               which values a checkpoint can hold
task                what a worker is started with
"""
