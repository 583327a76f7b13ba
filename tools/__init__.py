"""Programs that write files of the repository: tables of the documentation, dashboards, pictures. See `make docs`."""
