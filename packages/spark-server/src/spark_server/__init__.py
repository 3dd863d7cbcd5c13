"""The spark command: CLI, configuration, scheduler, engine process, HTTP. Importing this package imports no torch."""
