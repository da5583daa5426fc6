"""Sources: datasets that read files block by block. Their modules must not import ray."""
