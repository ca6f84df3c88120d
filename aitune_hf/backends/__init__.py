"""What can run a graph faster than eager, and the seam to add more."""
