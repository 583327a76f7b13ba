"""`rolecall eval` and `rolecall export`.

agreement.py   The outputs of an exported model compared with those of its checkpoint, on the same data
card.py        The model card, which describes an exported model as JSON beside its file
evaluation.py  `rolecall eval`: calls a job's `evaluate` or `complete` with a checkpoint
exported.py    The result of a job's `export` function: the model of a checkpoint
exporting.py   `rolecall export`: the model of a checkpoint as a file that needs no Rolecall
formats.py     The formats of exported models: how a file is written, run again, and loaded without Rolecall
saved.py       A checkpoint with its job and the settings that it was trained with
"""
