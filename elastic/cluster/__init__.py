"""Ray: trainer, driver, worker group and node view. The only room that knows ray."""
