"""What a dataset is: elements, the nodes of a plan, its sources, and the cursors that read it."""
