"""Starting head and workers: on this machine (local)."""
