"""The parts of tools/fuzz.py: what is damaged, and how readers are judged."""
