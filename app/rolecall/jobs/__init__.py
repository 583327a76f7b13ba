"""The jobs that ship with Rolecall."""
