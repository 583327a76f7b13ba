"""`rolecall run` and `rolecall.start`: all ranks of a job on this machine, in containers, or on hosts by ssh, and
commands for them; or on a cluster.

commands.py      `rolecall ps`, `kill`, `scale` and `stop`: commands for a run, which they reach by its control socket
batch_script.py  The batch script of a job on Slurm
clusters.py      `rolecall run JOB --on slurm`: describes the job, and follows its run on the cluster
containers.py    `rolecall run --on docker`: a container for each rank, and what all of them are given
control.py       The control socket of `rolecall run`: other commands list its ranks there
debugger.py      `rolecall debug`: attaches the terminal to a member that is stopped
detached.py      `rolecall run JOB --detach`: starts a run as a process of its own
ended.py         How a run that `rolecall.start` holds has ended: its result, or an error
fetch.py         `rolecall fetch`: where a run's summary, history and newest checkpoint are, or a copy of them
followed.py      A run that a cluster holds: it is submitted and followed from here
gpu.py           GPUs for the ranks of `rolecall run`
here.py          What ranks need of their machine: ports, GPUs, a temporary folder, and the start of their processes
host.py          A host of `rolecall run --hosts`: its connection by ssh, and the ranks there
hosted.py        What `rolecall run --hosts` starts on each host, by ssh: runs ranks there
hosts.py         `rolecall run --hosts`: which rank runs on which host, and what all of them are given
in_process.py    `rolecall run --in-process`: all ranks as threads of its own process
in_pod.py        In a pod of a run on Kubernetes: kills the rank's processes, or a part of them
kubectl.py       kubectl: runs it, and says in a line what is wrong if it fails
kubernetes.py    `rolecall run --on kubernetes`: pods of Jobs, which kubectl submits, asks for, and ends
local.py         All ranks of a job, as processes on this machine or on hosts: `rolecall run JOB`
logs.py          `rolecall logs`: what the ranks of a run have written
lost_pods.py     In a pod of its own: lets go of ranks' pods that a dead node holds
needs.py         What each member of a role needs, as `--role` gives it, and how many it may have
notebook.py      A run in a notebook: its state below the cell, until the run is over
on_batch_host.py  On the first node of a job of Slurm: starts its ranks, and again those of a lost node
on_hosts.py      `rolecall run --hosts`, or in containers: connects to them, and meanwhile describes the job here
on_node.py       Kills a rank's processes on a node of Slurm
output.py        What `rolecall run` prints, by a thread of its own: a terminal that is slow
pod_states.py    What a run on Kubernetes is, by its objects: its ranks, what they wait for, how it ended
pods.py          The objects of a run on Kubernetes
process_run.py   `rolecall.start`: a run whose ranks are processes, held by a process of `rolecall run`
rank_process.py  A rank of `rolecall run`: its process, which is restarted when it crashes, and its log
room.py          `rolecall run --hosts`: where the ranks of a host go that stays away
run.py           `rolecall.run` and `rolecall.start`: a job is run from Python
screen.py        What `rolecall run` shows of a run: lines, and the live display of rank 0's state
slurm.py         `rolecall run --on slurm`: a run whose ranks are tasks of a job of Slurm
ssh.py           OpenSSH's client: the commands, and what its errors mean
thread_run.py    `rolecall.start`: a run whose ranks are threads of this process
"""
