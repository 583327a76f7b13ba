"""Who is in, and which generation runs. Pure logic: no I/O, no clock."""
