"""What happens in a worker process: run, state, checkpoint, data. Works without ray."""
