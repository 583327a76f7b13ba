"""Who looks on, and who starts all ranks here."""
