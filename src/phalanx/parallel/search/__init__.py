"""Finding the cheapest assignment: exactly, within a memory budget, or by MindSpore's heuristics."""
