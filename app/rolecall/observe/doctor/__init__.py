"""`rolecall doctor`: checks of all that a rank needs, each with what to do where it is wrong."""
